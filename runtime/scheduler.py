"""Continuous batching: which tokens of which sequences the next step computes. Pure CPU bookkeeping; no tensor, no device.

A step first gives every decoding sequence its one token, then goes on with prompts that are under way, then admits waiting sequences, first
come first served, all under `max_num_batched_tokens` (long prompts are cut into chunks). When pages run out, the newest running sequence
is put back and its keys and values are computed again later (preemption by recompute): its tokens are kept, so its output does not change.

Adapters: at most `num_slots` are resident. A request whose adapter finds no slot waits, and others pass it; in return, the adapter that was
least recently admitted takes no requests newer than the waiting one, so its slot comes free in the end.

Plans may be made one step ahead: a token that the last plan samples is `in_flight` until `commit`, and the next plan refers to it by its row in
that plan. Pages that a plan in flight still writes may be handed to a later plan, because plans run in order on one stream.
"""
from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from ..ops.kv_layout import PAGE_SIZE
from .adapter_slots import AdapterSlots
from .errors import RequestError
from .pages import PageAllocator, pages_for
from .plan import StepPlan, StepResult
from .request import Sequence, Status
from .rows import RowTable


@dataclass(frozen=True)
class SchedulerLimits:
    """The engine's sizes: KV pages, tokens of a sequence, sequences at once, query tokens of a step, adapter slots."""

    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_slots: int = 0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}, "
                             "so not every running sequence would get its token in a step; raise the one or lower the other")
        if self.num_pages < pages_for(self.max_model_len):
            raise ValueError(f"{self.num_pages} KV pages do not hold one sequence of max_model_len={self.max_model_len} tokens "
                             f"({pages_for(self.max_model_len)} pages); lower max_model_len or give the KV cache more memory")


@dataclass(frozen=True)
class Sampled:
    """One sequence's new token; `row` is its row in the step's result."""

    sequence: Sequence
    token: int
    row: int


class Scheduler:
    """Owns the waiting and running sequences, the KV pages and the adapter slots.

    `adapter_numbers`: name -> the number by which the runner knows the adapter (may grow while the engine runs).
    """

    def __init__(self, limits: SchedulerLimits, adapter_numbers: Mapping[str, int] | None = None) -> None:
        self.limits = limits
        self.adapter_numbers = {} if adapter_numbers is None else adapter_numbers
        self.pages = PageAllocator(limits.num_pages)
        self.slots = AdapterSlots(limits.num_slots)
        self.rows = RowTable(limits.max_num_seqs, pages_for(limits.max_model_len))
        self.running: list[Sequence] = []  # by arrival
        self._waiting: dict[str | None, deque[Sequence]] = {}
        self._issued: dict[int, tuple[StepPlan, list[Sequence]]] = {}
        self._step = 0

    # -- requests ------------------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError for one that can never run."""
        if sequence.adapter is not None and self.limits.num_slots == 0:
            raise RequestError(f"adapter={sequence.adapter!r} needs an adapter slot, but max_loras is 0; give LLM its adapters or raise max_loras")
        if not 0 < len(sequence.tokens) < sequence.limit <= self.limits.max_model_len:
            raise RequestError(f"a prompt of {len(sequence.tokens)} tokens leaves no room for output within max_model_len={self.limits.max_model_len}; "
                               "shorten the prompt or raise max_model_len")
        self._waiting.setdefault(sequence.adapter, deque()).append(sequence)

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence now (also to abort one): its pages, row and adapter slot come free for the next plan."""
        if sequence.finished:
            return
        if sequence.status is Status.RUNNING:
            self._withdraw(sequence)
        else:
            self._waiting[sequence.adapter].remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be admitted."""
        return sum(map(len, self._waiting.values()))

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.running) or self.num_waiting > 0

    # -- planning ------------------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an issued step is committed (or at all)."""
        work: list[tuple[Sequence, int]] = []
        budget = self.limits.max_num_batched_tokens
        prompts: list[Sequence] = []
        preempted = False
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING or not self._ready(sequence):
                continue
            if sequence.length - sequence.computed > 1:
                prompts.append(sequence)
                continue
            if sequence.computed == len(sequence.pages) * PAGE_SIZE:
                preempted |= self._next_page(sequence)
                if sequence.status is not Status.RUNNING:
                    continue
            work.append((sequence, 1))
            budget -= 1
        for sequence in prompts:
            if budget > 0 and sequence.status is Status.RUNNING:
                count = min(budget, sequence.length - sequence.computed)
                work.append((sequence, count))
                budget -= count
        loads: list[tuple[int, int]] = []
        if not preempted:
            self._admit(work, budget, loads)
        return self._plan(work, loads) if work else None

    def _ready(self, sequence: Sequence) -> bool:
        """Whether the sequence has something to compute that does not wait for an issued step."""
        if not sequence.in_flight:
            return len(sequence.tokens) < sequence.limit
        return sequence.length < sequence.limit and sequence.sampled_at[0] == self._step - 1 and not sequence.params.needs_history

    def _next_page(self, sequence: Sequence) -> bool:
        """Give a decoding sequence its next page; returns whether any sequence had to be preempted for it (perhaps itself)."""
        preempted = False
        while (pages := self.pages.allocate(1)) is None:
            victim = self.running[-1]  # the newest; never one that this step already serves, because those are older than `sequence`
            self._preempt(victim)
            preempted = True
            if victim is sequence:
                return True
        sequence.pages += pages
        self.rows.set_pages(sequence, len(sequence.pages) - 1)
        return preempted

    def _preempt(self, sequence: Sequence) -> None:
        self._withdraw(sequence)
        sequence.status = Status.WAITING
        sequence.computed = 0
        sequence.preemptions += 1
        self._waiting[sequence.adapter].appendleft(sequence)  # it is older than every waiting sequence of its adapter

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a running sequence's pages, row and adapter use away."""
        self.running.remove(sequence)
        self.pages.free(sequence.pages)
        sequence.pages = []
        self.rows.release(sequence)
        if sequence.adapter is not None:
            self.slots.release(sequence.adapter)

    def _admit(self, work: list[tuple[Sequence, int]], budget: int, loads: list[tuple[int, int]]) -> None:
        """Start waiting sequences, oldest first, as long as tokens, rows and pages last."""
        heads = [(queue[0].arrival, adapter or "", adapter) for adapter, queue in self._waiting.items() if queue]
        heapify(heads)
        draining: set[str] = set()
        while heads and budget > 0 and self.rows.num_free:
            _, _, adapter = heappop(heads)
            queue = self._waiting[adapter]
            sequence = queue[0]
            if sequence.in_flight:  # preempted while its token is on the way
                continue
            if adapter is not None and adapter in draining:
                continue
            if adapter is not None and not self.slots.available(adapter):
                draining.update([name for name in self.slots.draining_order() if name not in draining][:1])
                continue
            need = pages_for(sequence.length)
            reserve = self.limits.num_pages // 100 if self.running else 0  # room for the running ones to grow, against preempting at once
            if need + reserve > self.pages.num_free:
                break
            queue.popleft()
            if queue:
                heappush(heads, (queue[0].arrival, adapter or "", adapter))
            self._start(sequence, need, loads)
            count = min(budget, sequence.length)
            work.append((sequence, count))
            budget -= count

    def _start(self, sequence: Sequence, need: int, loads: list[tuple[int, int]]) -> None:
        slot = -1
        if sequence.adapter is not None:
            acquired = self.slots.acquire(sequence.adapter)
            if acquired is None:
                raise RuntimeError(f"adapter {sequence.adapter!r} lost its slot between two looks at it")
            slot, must_load = acquired
            if must_load:
                loads.append((slot, self.adapter_numbers[sequence.adapter]))
        pages = self.pages.allocate(need)
        if pages is None:
            raise RuntimeError(f"{need} pages vanished between two looks at them")
        sequence.status = Status.RUNNING
        sequence.pages = pages
        self.rows.claim(sequence, slot)
        self.rows.set_pages(sequence, 0)
        insort(self.running, sequence, key=lambda other: other.arrival)

    def _plan(self, work: list[tuple[Sequence, int]], loads: list[tuple[int, int]]) -> StepPlan:
        """Flat arrays for the chosen work; marks it as computed."""
        sequences = [sequence for sequence, _ in work]
        counts = np.asarray([count for _, count in work], np.int32)
        rows = np.asarray([sequence.row for sequence in sequences], np.int32)
        starts = np.asarray([sequence.computed for sequence in sequences], np.int32)
        query_start = np.zeros(len(work) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        ends: list[int] = query_start[1:].tolist()
        input_ids: list[int] = []
        feed: list[tuple[int, int]] = []
        sampled: list[int] = []
        steps = np.zeros(len(work), np.int64)
        for index, (sequence, count) in enumerate(work):
            end, length = sequence.computed + count, sequence.length
            if count == 1 and end <= len(sequence.tokens):
                input_ids.append(sequence.tokens[end - 1])
            else:
                input_ids += sequence.tokens[sequence.computed:end]
            if len(input_ids) < ends[index]:  # the last token is still on the device
                feed.append((len(input_ids), sequence.sampled_at[1]))
                input_ids.append(0)
            sequence.computed = end
            if end == length:
                steps[index] = length - sequence.prompt_length
                sampled.append(index)
                sequence.in_flight += 1
                sequence.sampled_at = (self._step, index)
        of_token = np.repeat(np.arange(len(work), dtype=np.int32), counts)
        positions = ((starts - query_start[:-1])[of_token] + np.arange(len(input_ids))).astype(np.int32)
        sample_rows = np.asarray(sampled, np.int32)
        longest = max(len(sequence.pages) for sequence in sequences)
        feeds = np.asarray(feed, np.int32).reshape(-1, 2)
        plan = StepPlan(
            step=self._step, decode=bool((counts == 1).all()), input_ids=np.asarray(input_ids, np.int32), positions=positions,
            slot_mapping=self.rows.slots(rows[of_token], positions), adapter_index=self.rows.adapter_slot[rows][of_token],
            block_table=self.rows.pages[rows, :longest], context_lens=starts + counts, query_start=query_start, logits_indices=query_start[1:] - 1,
            sample_rows=sample_rows, feed_positions=feeds[:, 0].copy(), feed_rows=feeds[:, 1].copy(), slot_loads=np.asarray(loads, np.int32).reshape(-1, 2),
            sampling=self.rows.sampling(rows, sequences, sample_rows, steps))
        self._issued[self._step] = (plan, sequences)
        self._step += 1
        return plan

    # -- results -------------------------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Sampled]:
        """Take a step's tokens in, in the order in which steps were issued; ends sequences that met their end-of-sequence, a stop token or their limit.

        Tokens of sequences that ended meanwhile are dropped.
        """
        plan, sequences = self._issued.pop(result.step)
        tokens = result.tokens.tolist()
        progress: list[Sampled] = []
        for row in plan.sample_rows.tolist():
            sequence, token = sequences[row], tokens[row]
            if sequence.finished:
                continue
            sequence.append(token)
            progress.append(Sampled(sequence, token, row))
            if token in sequence.eos_ids:
                self.finish(sequence, "stop")
            elif token in sequence.stop_ids:
                self.finish(sequence, "stop", token)
            elif len(sequence.tokens) >= sequence.limit:
                self.finish(sequence, "length")
        return progress
