"""Steps with few prompt tokens as decode steps: each token is a row with its own context.

A layer writes the keys and values of all rows before its attention reads them, so a token sees those before it in the
same step. This is true of a sequence's last page only: kernels fetch its other pages earlier. Decode programs have
finer sizes than those of prompts, and CUDA graphs from the start. In return, every token reads its whole context.
"""

from dataclasses import replace

import numpy as np

from ...ops.core.kv_layout import PAGE_SIZE
from ..scheduler.step_plan import StepPlan

MOST_EXTRA_ROWS = 32
"""Most tokens besides one per sequence."""
MOST_EXTRA_CONTEXT = 1 << 16
"""Most tokens of context that these rows read together."""


def as_decode_rows(plan: StepPlan, max_rows: int) -> StepPlan | None:
    """Return the step with one sequence per token; its logits have a row per token.

    Returns None for a decode step, a step with speculation, one of more than `max_rows` tokens, one that takes longer
    this way, and one that writes to several pages of a sequence.
    """
    rows, extra = plan.num_tokens, plan.num_tokens - plan.num_sequences
    if plan.decode or plan.follows or rows > max_rows or extra > MOST_EXTRA_ROWS:
        return None
    sequences = np.repeat(np.arange(plan.num_sequences), np.diff(plan.query_start))
    every = np.arange(rows + 1, dtype=np.int32)
    after = plan.query_start[1:][sequences] - every[1:]  # number of tokens of the same sequence
    contexts = plan.context_lens[sequences] - after
    if ((contexts - 1) // PAGE_SIZE != (plan.context_lens[sequences] - 1) // PAGE_SIZE).any():
        return None
    if int(contexts[after > 0].sum()) > MOST_EXTRA_CONTEXT:
        return None
    return replace(
        plan,
        decode=True,
        block_table=plan.block_table[sequences],
        context_lens=contexts,
        query_start=every,
        logits_indices=every[:-1],
    )
