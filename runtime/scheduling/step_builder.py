"""From chosen work to a step plan's flat arrays."""

import numpy as np

from ..steps.plan import StepPlan
from .rows import RowTable
from .sequence import Sequence

Work = list[tuple[Sequence, int]]  # a sequence, and how many of its tokens the step computes


def build_plan(step: int, work: Work, rows: RowTable, slot_loads: list[tuple[int, int]]) -> StepPlan:
    """The plan of `work`, which counts as computed from now on; sequences whose last token it computes get a token in
    flight.

    Raises SequenceFault, and then has changed nothing.
    """
    sequences = [sequence for sequence, _ in work]
    count = len(work)
    counts = np.array([tokens for _, tokens in work], np.int32)
    row_of = np.array([sequence.row for sequence in sequences], np.int32)
    starts = np.array([sequence.computed for sequence in sequences], np.int32)
    query_start = np.zeros(count + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    input_ids: list[int] = []
    feed_positions: list[int] = []
    feed_rows: list[int] = []
    sampled: list[int] = []
    steps = [0] * count
    for index, (sequence, tokens) in enumerate(work):  # runs for every sequence of every step
        ids, begin = sequence.tokens, sequence.computed
        end, known = begin + tokens, len(ids)
        if end > known:  # the last token is still on the device
            input_ids += ids[begin:]
            feed_positions.append(len(input_ids))
            feed_rows.append(sequence.sampled_at[1])
            input_ids.append(0)
        elif tokens == 1:
            input_ids.append(ids[begin])
        else:
            input_ids += ids[begin:end]
        if end == known + sequence.in_flight:
            steps[index] = end - sequence.prompt_length
            sampled.append(index)
    decode = len(input_ids) == count
    of_token = np.arange(count, dtype=np.int32) if decode else np.repeat(np.arange(count, dtype=np.int32), counts)
    positions = (
        starts if decode else ((starts - query_start[:-1])[of_token] + np.arange(len(input_ids))).astype(np.int32)
    )
    sample_rows = np.array(sampled, np.int32)
    longest = max(len(sequence.pages) for sequence in sequences)
    token_rows = row_of if decode else row_of[of_token]
    plan = StepPlan(
        step=step,
        decode=decode,
        input_ids=np.array(input_ids, np.int32),
        positions=positions,
        slot_mapping=rows.slots(token_rows, positions),
        adapter_index=rows.adapter_slot[token_rows],
        block_table=rows.pages[row_of, :longest],
        context_lens=starts + counts,
        query_start=query_start,
        logits_indices=query_start[1:] - 1,
        sample_rows=sample_rows,
        feed_positions=np.array(feed_positions, np.int32),
        feed_rows=np.array(feed_rows, np.int32),
        slot_loads=np.asarray(slot_loads, np.int32).reshape(-1, 2),
        sampling=rows.sampling(row_of, sequences, sample_rows, np.array(steps, np.int64)),
    )
    for sequence, tokens in work:
        sequence.computed += tokens
    for index in sampled:
        sequence = sequences[index]
        sequence.in_flight += 1
        sequence.sampled_at = (step, index)
    return plan
