"""Builds step plans: tables with a row for each running sequence, from which numpy gathers a step's arrays."""

import numpy as np

from ...ops.core.kv_layout import PAGE_SIZE
from .answer_history import AnswerHistory
from .logit_edits import LogitEdits
from .prompt_logprobs import rows_to_score
from .sequence import Sequence
from .step_plan import Int32, Int64, SamplingPlan, StepPlan

Work = list[tuple[Sequence, int]]  # a sequence and the number of its tokens that the step computes


class SequenceFault(Exception):
    """One sequence could not be put into a plan."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(f"request {sequence.request_id!r}")
        self.sequence = sequence


class RowTable:
    """Tables with a row for each running sequence: its pages, adapter slot, ring and sampling parameters.

    Rows are assigned by `claim` and freed by `release`; the content of a free row is undefined.
    """

    def __init__(self, num_rows: int, pages_per_sequence: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self.pages = np.zeros((num_rows, pages_per_sequence), np.int32)
        self.adapter_slot = np.full(num_rows, -1, np.int32)
        self.adapter_number = np.full(num_rows, -1, np.int32)
        self.active_from = np.zeros(num_rows, np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.int64)
        self.prompt_length = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.full(num_rows, -1, np.int32)
        self.penalties = np.zeros((num_rows, 3), np.float32)
        self.edited = np.zeros(num_rows, np.bool_)
        self.ring = np.full(num_rows, -1, np.int32)

    @property
    def num_free(self) -> int:
        """Free rows."""
        return len(self._free)

    def claim(self, sequence: Sequence, slot: int, ring: int = -1) -> None:
        """Assign a row to `sequence` and fill it in, except the pages (`set_pages`)."""
        row, params = self._free.pop(), sequence.params
        sequence.row = row
        self.adapter_slot[row], self.adapter_number[row], self.ring[row] = slot, sequence.number, ring
        self.active_from[row] = sequence.active_from if slot >= 0 else 0
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = sequence.seed
        self.prompt_length[row] = sequence.prompt_length
        self.edited[row] = sequence.edits_logits
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.penalties[row] = params.presence_penalty, params.frequency_penalty, params.repetition_penalty

    def set_pages(self, sequence: Sequence, first: int) -> None:
        """Fill in `sequence.pages[first:]`."""
        self.pages[sequence.row, first : len(sequence.pages)] = sequence.pages[first:]

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's row."""
        self._free.append(sequence.row)
        sequence.row = -1

    def slots(self, rows: Int32, positions: Int32) -> Int32:
        """Return the KV slots of the tokens at `positions` of `rows`."""
        return self.pages[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def adapter_slots(self, rows: Int32, positions: Int32) -> Int32:
        """Return the adapter slots of the tokens at `positions` of `rows`; -1 before an activation."""
        slots, active_from = self.adapter_slot[rows], self.active_from[rows]
        return np.where(positions < active_from, np.int32(-1), slots) if active_from.any() else slots

    def edits(self, rows: Int32, sequences: list[Sequence], sampled: Int32, first: Int32, steps: Int64) -> LogitEdits:
        """Return the logit edits of a plan's B sequences. Raises SequenceFault.

        rows     of the sequences in these tables
        sampled  indices of the sequences that get a token
        first    each sequence's row of the logits
        steps    each sequence's output tokens so far
        """
        edits = LogitEdits()
        for index in sampled[self.edited[rows[sampled]]].tolist():
            try:
                edits.add(sequences[index], int(first[index]), int(steps[index]))
            except Exception as error:
                raise SequenceFault(sequences[index]) from error
        return edits

    def sampling(
        self, rows: Int32, sampled: Int32, steps: Int64, edits: LogitEdits, num_prompt_logprobs: int
    ) -> SamplingPlan:
        """Return the sampling part of a plan; `rows`, `steps`: of its rows of logits, where `sampled` ones count."""
        chosen = rows[sampled]
        presence, frequency, repetition = self.penalties[rows].T
        return SamplingPlan(
            greedy=not self.temperature[chosen].any(),
            num_logprobs=int(self.num_logprobs[chosen].max(initial=-1)),
            num_prompt_logprobs=num_prompt_logprobs,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seeds=self.seed[rows],
            steps=steps,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            **edits.arrays(),
        )


def build_plan(
    step: int,
    work: Work,
    rows: RowTable,
    slot_loads: list[tuple[int, int]],
    answers: AnswerHistory | None = None,
    cascade: bool = False,
) -> StepPlan:
    """Return the plan of `work`, and count its tokens as computed or in flight. Tokens beyond a sequence's are drafts.

    `answers`: the device keeps the sequences' tokens; None: it does not. `cascade`: from `SharedPrefixes.group`.

    Raises SequenceFault before anything has changed.
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
    drafts = [0] * count
    next_tokens = [-1] * count
    for index, (sequence, tokens) in enumerate(work):  # hot loop: all sequences of all steps
        ids, begin = sequence.tokens, sequence.computed
        end, known = begin + tokens, len(ids)
        if sequence.on_device:
            input_ids += [0] * tokens
        elif end > known:  # the last token's id is still on the device
            input_ids += ids[begin:]
            feed_positions.append(len(input_ids))
            feed_rows.append(sequence.sampled_at[1])
            input_ids.append(0)
        elif tokens == 1:
            input_ids.append(ids[begin])
        else:
            input_ids += ids[begin:end]
        surplus = end - known - sequence.in_flight
        if surplus >= 0:
            steps[index] = end - surplus - sequence.prompt_length
            sampled.append(index)
            drafts[index] = surplus
        elif end < known:
            next_tokens[index] = ids[end]
    decode = len(input_ids) == count and not sequences[0].given_left
    of_token = np.arange(count, dtype=np.int32) if decode else np.repeat(np.arange(count, dtype=np.int32), counts)
    positions = (
        starts if decode else ((starts - query_start[:-1])[of_token] + np.arange(len(input_ids))).astype(np.int32)
    )
    sample_rows = np.array(sampled, np.int32)
    scored = rows_to_score(work, query_start)
    last_rows = query_start[1:] - 1
    longest = max(len(sequence.pages) for sequence in sequences)
    token_rows = row_of if decode else row_of[of_token]
    output_tokens = np.array(steps, np.int64)
    device_fields = (
        {}
        if answers is None
        else _device_fields(work, sample_rows, drafts, next_tokens) | answers.plan_fields(rows.ring[row_of])
    )
    if any(drafts):  # every token's row is sampled
        logits_indices = np.arange(len(input_ids), dtype=np.int32)
        logits_rows, sampled_logits, first = token_rows, logits_indices, query_start[:-1]
    else:
        logits_indices = np.concatenate((last_rows, np.array(scored.extra, np.int32))) if scored.extra else last_rows
        logits_rows, sampled_logits, first = row_of, sample_rows, np.arange(count, dtype=np.int32)
    edits = rows.edits(row_of, sequences, sample_rows, first, output_tokens)
    noise_steps = 1 - rows.prompt_length[logits_rows] if device_fields else output_tokens
    plan = StepPlan(
        step=step,
        decode=decode,
        cascade=cascade,
        input_ids=np.array(input_ids, np.int32),
        positions=positions,
        slot_mapping=rows.slots(token_rows, positions),
        adapter_index=rows.adapter_slots(token_rows, positions),
        adapter_numbers=rows.adapter_number[row_of],
        block_table=rows.pages[row_of, :longest],
        context_lens=starts + counts + np.array([sequence.drafted for sequence in sequences], np.int32),
        query_start=query_start,
        logits_indices=logits_indices,
        scored_rows=np.array(scored.rows, np.int32),
        scored_tokens=np.array(scored.tokens, np.int32),
        sample_rows=sample_rows,
        feed_positions=np.array(feed_positions, np.int32),
        feed_rows=np.array(feed_rows, np.int32),
        slot_loads=np.asarray(slot_loads, np.int32).reshape(-1, 2),
        masked_rows=np.array([index for index in sampled if sequences[index].matcher is not None], np.int32),
        sampling=rows.sampling(logits_rows, sampled_logits, noise_steps, edits, scored.num_logprobs),
        **device_fields,
    )
    if answers is not None:
        answers.mark_planned()
    for index, (sequence, tokens) in enumerate(work):
        sequence.computed += tokens - drafts[index]
    for index in sampled:
        sequence = sequences[index]
        sequence.in_flight += 1
        sequence.drafted += drafts[index]
        sequence.on_device = bool(device_fields)
        sequence.sampled_at = (step, index)
    return plan


def _device_fields(work: Work, sampled: Int32, drafts: list[int], next_tokens: list[int]) -> dict[str, Int32]:
    """Return the plan's fields about tokens that the device keeps.

    The plan that samples the first token of a newly running sequence has all tokens before it.
    """
    follow_rows, counts = [-1] * len(work), [-1] * len(work)
    started: list[Sequence] = []
    for index in sampled.tolist():
        sequence, _ = work[index]
        follow_rows[index] = sequence.row
        if sequence.on_device:
            counts[index] = drafts[index]
        else:
            started.append(sequence)
    found = {
        "follow_rows": np.array(follow_rows, np.int32),
        "next_tokens": np.array(next_tokens, np.int32),
        "drafts": np.array(counts, np.int32),
    }
    if not started:
        return found
    return found | {
        "start_rows": np.array([sequence.row for sequence in started], np.int32),
        "start_lengths": np.array([len(sequence.tokens) for sequence in started], np.int32),
        "start_tokens": np.array([token for sequence in started for token in sequence.tokens], np.int32),
    }
