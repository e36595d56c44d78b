"""Continuous batching: which tokens of which sequences the next step computes. Pure CPU bookkeeping; no tensor, no device.

A step first gives every decoding sequence its one token, then goes on with prompts that are under way, then admits waiting sequences (by
priority, fairly between adapters: `waiting`), all under `max_num_batched_tokens` (long prompts are cut into chunks). What the prefix cache holds of a
prompt is not computed again. When pages run out, the last running sequence (lowest priority, newest) is put back and computed again later
(preemption by recompute): its tokens are kept, so its output does not change.

Adapters: at most `num_slots` are resident (`residency`). A request whose adapter finds no slot, or is on its way into one, waits, and others pass it.

Plans may be made one step ahead: a token that the last plan samples is `in_flight` until `commit`, and the next plan refers to it by its row in
that plan. Pages that a plan in flight still writes may be handed to a later plan, because plans run in order on one stream.
"""
import time
from bisect import insort
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from ..ops.kv_layout import PAGE_SIZE
from .errors import RequestError
from .pages import PageAllocator, pages_for
from .plan import StepPlan, StepResult
from .prefix_cache import PrefixCache
from .request import Sequence, Status
from .residency import Residency
from .rows import RowTable
from .scheduler_limits import SchedulerLimits, SchedulerStats
from .step_builder import Work, build_plan
from .step_failure import STEP_FAULT, Issued, what_is_lost
from .waiting import WaitingQueues


class Sampled(NamedTuple):
    """One sequence's new token; `row` is its row in the step's result."""

    sequence: Sequence
    token: int
    row: int


class Scheduler:
    """Owns the waiting and running sequences, the KV pages and the adapter slots.

    adapter_numbers      name -> the number by which the runner knows the adapter (may change while the engine runs; a number keeps its meaning)
    adapter_hashes       number -> hash of the adapter's content, which the prefix cache goes by
    asynchronous_loads   False: a plan says which adapters to copy before it runs. True: `take_loads` says what to copy meanwhile, and `load_done`
                         must be called for each when it is over
    clock                seconds, for deadlines; must never go back
    """

    def __init__(
        self, limits: SchedulerLimits, adapter_numbers: Mapping[str, int] | None = None, adapter_hashes: Mapping[int, str] | None = None, *,
        asynchronous_loads: bool = False, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.limits = limits
        self.adapter_numbers = {} if adapter_numbers is None else adapter_numbers
        self.clock = clock
        self.pages = PageAllocator(limits.num_pages)
        self.prefix_cache = PrefixCache(self.pages, {} if adapter_hashes is None else adapter_hashes, limits.prefix_caching)
        self.rows = RowTable(limits.max_num_seqs, pages_for(limits.max_model_len))
        self.waiting = WaitingQueues()
        self.residency = Residency(limits.num_slots, limits.slot_patience, asynchronous_loads, self.waiting)
        self.slots = self.residency.slots
        self.running: list[Sequence] = []  # by priority, then arrival
        self.preemptions = 0
        self.timeouts = 0
        self._issued: dict[int, Issued] = {}
        self._step = 0
        self._committed = -1
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._ended: list[Sequence] = []
        self._uses_priorities = False

    # -- requests ------------------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError for one that can never run."""
        if sequence.adapter is not None:
            sequence.number = self._number(sequence.adapter)
        if not 0 < len(sequence.tokens) < sequence.limit <= self.limits.max_model_len:
            raise RequestError(f"a prompt of {len(sequence.tokens)} tokens leaves no room for output within max_model_len={self.limits.max_model_len}; "
                               "shorten the prompt or raise max_model_len")
        if not self.waiting.active(sequence.number):
            self.residency.requested(sequence.number)
        self.waiting.enter(sequence)
        if sequence.deadline is not None:
            if len(self._deadlines) > 64 + 2 * (len(self.running) + len(self.waiting)):  # mostly those of finished sequences
                self._deadlines = sorted(entry for entry in self._deadlines if not entry[-1].finished)
            heappush(self._deadlines, (sequence.deadline, sequence.arrival, sequence))
        self._uses_priorities |= sequence.priority != 0

    def _number(self, name: str) -> int:
        if self.limits.num_slots == 0:
            raise RequestError(f"adapter={name!r} needs an adapter slot, but max_loras is 0; give LLM its adapters or raise max_loras")
        number = self.adapter_numbers.get(name)
        if number is None:
            raise RequestError(f"adapter={name!r} is not known; load it first")
        if self.slots.num_pinned >= self.limits.num_slots and not self.slots.is_pinned(number):
            raise RequestError(f"adapter={name!r} would never find a slot: all {self.limits.num_slots} are pinned to others; unpin one or raise max_loras")
        return number

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence now (also to abort one): its pages, row and adapter slot come free for the next plan."""
        if sequence.finished:
            return
        waiting = sequence.status is Status.WAITING
        if not waiting:
            self._withdraw(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if self.waiting.leave(sequence, waiting):
            self.residency.unused(sequence.number)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be admitted."""
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.running) or self.num_waiting > 0

    def take_ended(self) -> list[Sequence]:
        """Sequences that the scheduler itself has ended since the last call: their deadline passed, or their adapter could not be loaded."""
        ended, self._ended = self._ended, []
        return ended

    def stats(self) -> SchedulerStats:
        """Where things stand."""
        slots, pages, cache = self.slots, self.pages, self.prefix_cache
        return SchedulerStats(
            running=len(self.running), waiting=len(self.waiting), pages=pages.num_pages, pages_used=pages.num_used, pages_cached=pages.num_cached,
            adapters_resident=len(slots.resident), adapters_loading=slots.num_loading, preemptions=self.preemptions, timeouts=self.timeouts,
            prefix_queries=cache.queries, prefix_hits=cache.hits, page_evictions=pages.evictions, adapter_admissions=slots.admissions,
            adapter_loads=slots.loads, adapter_evictions=slots.evictions, adapter_failures=self.residency.failures)

    # -- adapters ------------------------------------------------------------------------------------------------------------------

    @property
    def asynchronous_loads(self) -> bool:
        """Whether adapters are copied beside the steps (see the class)."""
        return self.residency.asynchronous

    def take_loads(self) -> list[tuple[int, int]]:
        """(slot, adapter number) of copies to start now; slot -1: only bring it into host memory. To be called after `schedule`."""
        return self.residency.take_loads()

    def load_done(self, slot: int, number: int, problem: str | None = None) -> None:
        """A copy that `take_loads` asked for is complete, or could not be made: `problem` then ends every sequence that waits for the adapter (a later
        request tries again). Reports for slot -1 change nothing."""
        if slot < 0:
            return
        if problem is None:
            self.residency.arrived(number)
            return
        for sequence in self.waiting.of(number):
            self.finish(sequence, "error", problem)
            self._ended.append(sequence)
        self.residency.failed(number)

    def forget_adapter(self, number: int) -> None:
        """No request will use this adapter any more (it was removed, or its name has a new content); those that are here finish on it."""
        self.residency.retire(number)

    def take_retired(self) -> list[int]:
        """Forgotten adapters that nobody uses any more, since the last call: the runner can drop them."""
        return self.residency.take_retired()

    # -- planning ------------------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an issued step is committed or an adapter has arrived (or at all)."""
        self._expire()
        self._vacate_slot()
        if self._uses_priorities:
            self._make_way()
        work: Work = []
        preempted = False
        budget = self.limits.max_num_batched_tokens
        prompts: list[Sequence] = []
        running = Status.RUNNING
        last = self._step - 1
        for sequence in list(self.running):  # the loop that decides what a step costs on the CPU
            known, in_flight = len(sequence.tokens), sequence.in_flight
            if known + in_flight >= sequence.limit or sequence.status is not running:
                continue
            if in_flight and (sequence.sampled_at[0] != last or sequence.needs_history):  # it waits for a step that is issued
                continue
            left = known + in_flight - sequence.computed
            if left > 1:
                prompts.append(sequence)
                continue
            if sequence.computed == len(sequence.pages) * PAGE_SIZE:
                preempted |= self._next_page(sequence)
                if sequence.status is not running:
                    continue
            work.append((sequence, 1))
        budget -= len(work)
        for sequence in prompts:
            if budget > 0 and sequence.status is Status.RUNNING:
                budget -= self._assign(work, sequence, budget)
        self._admit(work, budget, preempted)
        if not work:
            return None
        plan = build_plan(self._step, work, self.rows, self.residency.loads_of_plan())
        self._issued[self._step] = (plan, [sequence for sequence, _ in work])
        self._step += 1
        return plan

    def _assign(self, work: Work, sequence: Sequence, budget: int) -> int:
        """Let the step compute as much of a prompt as the budget allows; returns how many tokens."""
        count = min(budget, sequence.length - sequence.computed)
        work.append((sequence, count))
        self.prefix_cache.publish(sequence, sequence.computed + count)
        return count

    def _expire(self) -> None:
        """End the sequences whose deadlines have passed."""
        if not self._deadlines:
            return
        now = self.clock()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][-1].finished):
            _, _, sequence = heappop(self._deadlines)
            if not sequence.finished:
                self.finish(sequence, "timeout", f"the request's deadline passed after {len(sequence.output_ids)} tokens; allow it more time")
                self._ended.append(sequence)
                self.timeouts += 1

    def _next_page(self, sequence: Sequence) -> bool:
        """Give a decoding sequence its next page; returns whether any sequence had to be preempted for it (perhaps itself)."""
        preempted = False
        while (pages := self.pages.allocate(1)) is None:
            victim = self.running[-1]  # never one that this step already serves, because those come before `sequence`
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
        self.preemptions += 1
        self.waiting.push(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a running sequence's pages, row and adapter use away."""
        self.running.remove(sequence)
        self.pages.free(sequence.pages)
        sequence.pages = []
        self.rows.release(sequence)
        self.waiting.charge(sequence.number, len(sequence.tokens) - sequence.charged)
        if sequence.number >= 0:
            self.slots.release(sequence.number, self._step - 1)

    def _vacate_slot(self) -> None:
        """Put back the sequences of an adapter whose slot another has waited for too long."""
        number = self.residency.take_vacated()
        for sequence in [sequence for sequence in self.running if sequence.number == number] if number is not None else []:
            self._preempt(sequence)

    def _make_way(self) -> None:
        """Put back running sequences that keep one of higher priority waiting for a row or for pages."""
        first = self.waiting.first() if self.running else None
        if first is None or first.in_flight or (first.number >= 0 and not self.slots.is_resident(first.number)):
            return
        while self.running and self.running[-1].priority > first.priority and not (self.rows.num_free and self._fits(first, self.prefix_cache.match(first))):
            self._preempt(self.running[-1])

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether there are pages for a sequence of which some are `cached`."""
        reserve = self.limits.num_pages // 100 if self.running else 0  # room for the running ones to grow, against preempting at once
        return pages_for(sequence.length) - len(cached) + self.pages.count_idle(cached) + reserve <= self.pages.num_free

    def _admit(self, work: Work, budget: int, preempted: bool) -> None:
        """Start waiting sequences as long as tokens, rows and pages last, and see to it that the adapters of the others come.

        Nothing is admitted in a step that had to preempt for pages.
        """
        turns = self.waiting.turns()
        if not turns:
            return
        self.residency.begin_pass(self._step, self._committed)
        while turns:
            *_, number = heappop(turns)
            sequence = self.waiting.head(number)
            full = preempted or budget <= 0 or not self.rows.num_free
            if full and not self.residency.wants_more:
                break
            if sequence is None or not self.residency.ready(number) or full or sequence.in_flight:  # in flight: preempted while its token is on the way
                continue
            cached = self.prefix_cache.match(sequence)
            if not self._fits(sequence, cached):
                preempted = True
                continue
            self.waiting.pop(number)
            self._start(sequence, cached)
            budget -= self._assign(work, sequence, budget)
            turn = self.waiting.turn(number)
            if turn is not None:
                heappush(turns, turn)

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        slot = self.residency.admitted(sequence.number)
        self.pages.share(cached)
        pages = self.pages.allocate(pages_for(sequence.length) - len(cached))
        if pages is None:
            raise RuntimeError(f"pages for {sequence.length} tokens vanished between two looks at them")
        sequence.status = Status.RUNNING
        sequence.pages = cached + pages
        sequence.computed = len(cached) * PAGE_SIZE
        sequence.published = len(cached)
        sequence.publish_at = sequence.computed + PAGE_SIZE
        self.waiting.charge(sequence.number, len(sequence.tokens) - sequence.computed)
        sequence.charged = len(sequence.tokens)
        self.prefix_cache.started(sequence)
        self.rows.claim(sequence, slot)
        self.rows.set_pages(sequence, 0)
        insort(self.running, sequence, key=lambda other: other.order)

    # -- results -------------------------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Sampled]:
        """Take a step's tokens in, in the order in which steps were issued; ends sequences that met their end-of-sequence, a stop token or their limit.

        Tokens of sequences that ended meanwhile are dropped.
        """
        plan, sequences = self._issued.pop(result.step)
        self._committed = result.step
        tokens = result.tokens.tolist()
        progress: list[Sampled] = []
        finished = Status.FINISHED
        for row in plan.sample_rows.tolist():
            sequence, token = sequences[row], tokens[row]
            if sequence.status is finished:
                continue
            sequence.append(token)
            progress.append(Sampled(sequence, token, row))
            if sequence.computed >= sequence.publish_at and sequence.pages:
                self.prefix_cache.publish(sequence, sequence.computed)
            if token in sequence.eos_ids:
                self.finish(sequence, "stop")
            elif token in sequence.stop_ids:
                self.finish(sequence, "stop", token)
            elif len(sequence.tokens) >= sequence.limit:
                self.finish(sequence, "length")
        return progress

    def fail_step(self, step: int, problem: str = STEP_FAULT) -> None:
        """A step that was issued has failed on the device: it has no tokens, and what it should have stored is not there.

        Ends its sequences, and those that were to read what it should have stored, with finish_reason `error`; `take_ended` tells which. To be called in
        place of `commit`.
        """
        failed = self._issued.pop(step)
        self._committed = step
        sequences, pages = what_is_lost(failed, list(self._issued.values()), self.running)
        self.pages.unpublish(pages)
        for sequence in sequences:
            if not sequence.finished:
                self.finish(sequence, "error", problem)
                self._ended.append(sequence)
