"""The masks of an issued step: what its constrained sequences may get, computed while the device works on the step."""

from collections.abc import Callable, Collection
from typing import cast

import numpy as np

from ..requests.errors import RequestError
from ..steps.plan import Int32, StepMasks, StepPlan
from ..structured.matcher import Matcher, fill_masks
from .sequence import Sequence

End = Callable[[Sequence, str, str | None], None]
NOTHING_LEFT = (
    "no token is left to sample: structured_outputs leaves only tokens that bad_words, allowed_token_ids or min_tokens "
    "forbids here; allow more tokens"
)


def masks_of(plan: StepPlan, sequences: list[Sequence], void: Collection[Sequence], end: End) -> StepMasks:
    """The masks of a step whose sequences' last tokens are known. Sequences whose tokens will be wrong (`void`) have
    none, and `end` is called with (sequence, finish reason, text) for those that cannot or need not go on.
    """
    rows: list[int] = []
    matchers: list[Matcher] = []
    for row in plan.masked_rows.tolist():
        sequence = sequences[row]
        if sequence.finished or sequence in void:
            continue
        matcher = cast(Matcher, sequence.matcher)
        try:
            matcher.advance(sequence.tokens, sequence.prompt_length)
        except RequestError as error:
            end(sequence, "error", str(error))
            continue
        rows.append(row)
        matchers.append(matcher)
    words = fill_masks(matchers)
    for place, matcher in enumerate(matchers):
        sequence = sequences[rows[place]]
        if matcher.failed:
            end(sequence, "error", matcher.problem())
        elif sequence.edits_logits or not sequence.eos_ids:
            _narrow(words[place], sequence, matcher, end)
    return StepMasks(plan.step, np.array(rows, np.int32), words)


def _narrow(words: Int32, sequence: Sequence, matcher: Matcher, end: End) -> None:
    """Take out what the request's other parameters forbid. A text that is complete, and may only end, ends."""
    step = len(sequence.tokens) - sequence.prompt_length
    banned = sequence.banned(step)
    if not sequence.eos_ids or step < sequence.params.min_tokens:
        banned |= set(matcher.grammar.eos_ids)
    bits = words.view(np.uint32)
    for token in banned:
        if token // 32 < len(bits):
            bits[token // 32] &= ~np.uint32(1 << token % 32)
    if sequence.allowed is not None:
        kept = np.zeros_like(bits)
        np.bitwise_or.at(kept, sequence.allowed // 32, np.uint32(1) << (sequence.allowed % 32).astype(np.uint32))
        bits &= kept
    if not bits.any():
        if matcher.accepting:
            end(sequence, "stop", None)
        else:
            end(sequence, "error", NOTHING_LEFT)
