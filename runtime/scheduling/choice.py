"""Which sequences the next step computes, and how many tokens of each: under the budget, by priority, fairly, and as
pages, rows and adapters last.
"""

from collections.abc import Mapping
from heapq import heappop, heappush

from ...ops.core.kv_layout import PAGE_SIZE
from .limits import SchedulerLimits
from .sequence import Sequence, Status
from .states import SequenceStates
from .step_builder import Work
from .suspects import Issued, Suspects


class StepChoice(SequenceStates):
    """Fills the `Work` of a step from what runs and waits."""

    def __init__(
        self, limits: SchedulerLimits, adapter_hashes: Mapping[int, str] | None, asynchronous_loads: bool
    ) -> None:
        super().__init__(limits, adapter_hashes, asynchronous_loads)
        self.suspects = Suspects()
        self._issued: dict[int, Issued] = {}
        self._at: Sequence | None = None  # whom the planning is about
        self._uses_priorities = False
        self.holds_back = False  # whether the last step left out a sequence whose last token must be known first

    def _choose(self, work: Work) -> Work:
        """Fill `work` with what the step computes."""
        self._vacate_slot()
        if self._uses_priorities:
            self._make_way()
        preempted = self.holds_back = False
        budget = self.limits.max_num_batched_tokens
        prompts: list[Sequence] = []
        running = Status.RUNNING
        last = self._step - 1
        for sequence in list(self.running):  # the loop that decides what a step costs on the CPU
            known, in_flight = len(sequence.tokens), sequence.in_flight
            if known + in_flight >= sequence.limit or sequence.status is not running:
                continue
            # it waits for a step that is issued
            if in_flight and (sequence.sampled_at[0] != last or sequence.needs_history):
                self.holds_back = True
                continue
            left = known + in_flight - sequence.computed
            if left > 1:
                prompts.append(sequence)
                continue
            if sequence.computed == len(sequence.pages) * PAGE_SIZE:
                self._at = sequence
                preempted |= self._next_page(sequence)
                if sequence.status is not running:
                    continue
            work.append((sequence, 1))
        budget -= len(work)
        for sequence in prompts:
            if budget > 0 and sequence.status is Status.RUNNING:
                budget -= self._assign(work, sequence, min(budget, sequence.length - sequence.computed))
        self._admit(work, budget, preempted)
        return work

    def _try_suspects(self, work: Work) -> Work:
        """The same while there are suspects: a step of the group that is on trial, as soon as no other step is at
        work.
        """
        if self._issued:
            return work
        budget = self.limits.max_num_batched_tokens
        group = self.suspects.on_trial()
        self.residency.begin_pass(self._step)
        later: list[Sequence] = []
        crowded = False
        for sequence in group:
            self._at = sequence
            if sequence.status is Status.HELD:
                cached = self.prefix_cache.match(sequence)
                room = self.rows.num_free > 0 and self._fits(sequence, cached)
                if not room or not self.residency.ready(sequence.number):
                    later.append(sequence)
                    crowded |= not room
                    continue
                self._start(sequence, cached)
            left = self.suspects.tokens_left(sequence)
            if budget > 0 and left > 0 and sequence.status is Status.RUNNING:
                budget -= self._assign(work, sequence, min(budget, left))
        if later and len(later) < len(group):
            self.suspects.put_off(later)
        elif crowded and self.running:
            self._preempt(self.running[-1])  # nobody of the group is running: another makes room
        return work if group else self._choose(work)

    def _take_back(self, work: Work) -> None:
        """A step that was not issued: nobody may count on what was announced of it."""
        writers: dict[int, Sequence] = {}
        for sequence, count in work:
            first = sequence.computed // PAGE_SIZE
            writers |= dict.fromkeys(sequence.pages[first : (sequence.computed + count) // PAGE_SIZE], sequence)
            sequence.published = min(sequence.published, first)
            sequence.publish_at = (sequence.published + 1) * PAGE_SIZE
        self.pages.unpublish(writers)
        for sequence in list(self.running):
            if any(writers.get(page, sequence) is not sequence for page in sequence.pages):
                self._preempt(sequence)

    def _assign(self, work: Work, sequence: Sequence, count: int) -> int:
        """Let the step compute so many tokens of a prompt; returns how many."""
        self._at = sequence
        work.append((sequence, count))
        self.prefix_cache.publish(sequence, sequence.computed + count)
        return count

    def _next_page(self, sequence: Sequence) -> bool:
        """Give a decoding sequence its next page; returns whether any sequence had to be preempted for it (perhaps
        itself).
        """
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

    def _vacate_slot(self) -> None:
        """Put back the sequences of an adapter whose slot another has waited for too long."""
        number = self.residency.take_vacated()
        for sequence in (
            [sequence for sequence in self.running if sequence.number == number] if number is not None else []
        ):
            self._preempt(sequence)

    def _make_way(self) -> None:
        """Put back running sequences that keep one of higher priority waiting for a row or for pages."""
        first = self.waiting.first() if self.running else None
        if first is None or first.in_flight or (first.number >= 0 and not self.slots.is_resident(first.number)):
            return
        while (
            self.running
            and self.running[-1].priority > first.priority
            and not (self.rows.num_free and self._fits(first, self.prefix_cache.match(first)))
        ):
            self._preempt(self.running[-1])

    def _admit(self, work: Work, budget: int, preempted: bool) -> None:
        """Start waiting sequences as long as tokens, rows and pages last, and see to it that the adapters of the others
        come.

        Nothing is admitted in a step that had to preempt for pages.
        """
        turns = self.waiting.turns()
        if not turns:
            return
        self.residency.begin_pass(self._step)
        while turns:
            *_, number = heappop(turns)
            self._at = sequence = self.waiting.head(number)
            full = preempted or budget <= 0 or not self.rows.num_free
            if full and not self.residency.wants_more:
                break
            # in flight: preempted while its token is on the way
            if sequence is None or not self.residency.ready(number) or full or sequence.in_flight:
                continue
            cached = self.prefix_cache.match(sequence)
            if not self._fits(sequence, cached):
                preempted = True
                continue
            self.waiting.pop(number)
            self._start(sequence, cached)
            budget -= self._assign(work, sequence, min(budget, sequence.length - sequence.computed))
            turn = self.waiting.turn(number)
            if turn is not None:
                heappush(turns, turn)
