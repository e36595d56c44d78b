"""Which sequences the next step computes, and how many tokens of each: under the budget, by priority, fairly, and as
pages, rows and adapters last.
"""

from heapq import heappop, heappush

from ...ops.core.kv_layout import PAGE_SIZE
from .rows import Work
from .sequence import Sequence, Status
from .states import States
from .suspects import Suspects


class Choice:
    """Fills the `Work` of a step from what runs and waits.

    at               whom the choice is about: the one to blame if it raises
    uses_priorities  whether any sequence has had a priority
    holds_back       whether the last step left out a sequence whose last token must be known first
    """

    def __init__(self, states: States) -> None:
        self.states = states
        self.suspects = Suspects()
        self.at: Sequence | None = None
        self.uses_priorities = False
        self.holds_back = False

    def fill(self, work: Work, idle: bool) -> Work:
        """Fill `work` with what the step computes, which may be nothing; returns it.

        `idle`: no step is at work. While there are suspects, a step waits for that.
        """
        if not self.suspects:
            return self._choose(work)
        return self._try_suspects(work) if idle else work

    def _choose(self, work: Work) -> Work:
        """Fill `work` when nobody is suspected."""
        states = self.states
        self._vacate_slot()
        if self.uses_priorities:
            self._make_way()
        preempted = self.holds_back = False
        budget = states.limits.max_num_batched_tokens
        prompts: list[Sequence] = []
        running = Status.RUNNING
        last = states.step - 1
        for sequence in list(states.running):  # the loop that decides what a step costs on the CPU
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
                self.at = sequence
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
        """The same while there are suspects: a step of the group that is on trial."""
        states = self.states
        budget = states.limits.max_num_batched_tokens
        group = self.suspects.on_trial()
        states.residency.begin_pass(states.step)
        later: list[Sequence] = []
        crowded = False
        for sequence in group:
            self.at = sequence
            if sequence.status is Status.HELD:
                cached = states.prefix_cache.match(sequence)
                room = states.rows.num_free > 0 and states.fits(sequence, cached)
                if not room or not states.residency.ready(sequence.number):
                    later.append(sequence)
                    crowded |= not room
                    continue
                states.start(sequence, cached)
            left = self.suspects.tokens_left(sequence)
            if budget > 0 and left > 0 and sequence.status is Status.RUNNING:
                budget -= self._assign(work, sequence, min(budget, left))
        if later and len(later) < len(group):
            self.suspects.put_off(later)
        elif crowded and states.running:
            states.preempt(states.running[-1])  # nobody of the group is running: another makes room
        return work if group else self._choose(work)

    def take_back(self, work: Work) -> None:
        """A step that was not issued: nobody may count on what was announced of it."""
        states = self.states
        writers: dict[int, Sequence] = {}
        for sequence, count in work:
            first = sequence.computed // PAGE_SIZE
            writers |= dict.fromkeys(sequence.pages[first : (sequence.computed + count) // PAGE_SIZE], sequence)
            sequence.published = min(sequence.published, first)
            sequence.publish_at = (sequence.published + 1) * PAGE_SIZE
        states.pages.unpublish(writers)
        for sequence in list(states.running):
            if any(writers.get(page, sequence) is not sequence for page in sequence.pages):
                states.preempt(sequence)

    def _assign(self, work: Work, sequence: Sequence, count: int) -> int:
        """Let the step compute so many tokens of a prompt; returns how many."""
        self.at = sequence
        work.append((sequence, count))
        self.states.prefix_cache.publish(sequence, sequence.computed + count)
        return count

    def _next_page(self, sequence: Sequence) -> bool:
        """Give a decoding sequence its next page; returns whether any sequence had to be preempted for it (perhaps
        itself).
        """
        states = self.states
        preempted = False
        while (pages := states.pages.allocate(1)) is None:
            victim = states.running[-1]  # never one that this step already serves, because those come before `sequence`
            states.preempt(victim)
            preempted = True
            if victim is sequence:
                return True
        sequence.pages += pages
        states.rows.set_pages(sequence, len(sequence.pages) - 1)
        return preempted

    def _vacate_slot(self) -> None:
        """Put back the sequences of an adapter whose slot another has waited for too long."""
        states = self.states
        number = states.residency.take_vacated(self._got_on)
        if number is not None:
            for sequence in [sequence for sequence in states.running if sequence.number == number]:
                states.preempt(sequence)

    def _got_on(self, number: int) -> bool:
        """Whether all running sequences of an adapter have sampled since they were admitted: no prompt is under way."""
        return all(
            sequence.in_flight or len(sequence.tokens) - sequence.computed <= 1
            for sequence in self.states.running
            if sequence.number == number
        )

    def _make_way(self) -> None:
        """Put back running sequences that keep one of higher priority waiting for a row or for pages."""
        states = self.states
        first = states.waiting.first() if states.running else None
        if first is None or first.in_flight or (first.number >= 0 and not states.slots.is_resident(first.number)):
            return
        while (
            states.running
            and states.running[-1].priority > first.priority
            and not (states.rows.num_free and states.fits(first, states.prefix_cache.match(first)))
        ):
            states.preempt(states.running[-1])

    def _admit(self, work: Work, budget: int, preempted: bool) -> None:
        """Start waiting sequences as long as tokens, rows and pages last, and see to it that the adapters of the others
        come.

        Nothing is admitted in a step that had to preempt for pages.
        """
        states = self.states
        turns = states.waiting.turns()
        if not turns:
            return
        states.residency.begin_pass(states.step)
        while turns:
            *_, number = heappop(turns)
            self.at = sequence = states.waiting.head(number)
            full = preempted or budget <= 0 or not states.rows.num_free
            if full and not states.residency.wants_more:
                break
            # in flight: preempted while its token is on the way
            if sequence is None or not states.residency.ready(number) or full or sequence.in_flight:
                continue
            cached = states.prefix_cache.match(sequence)
            if not states.fits(sequence, cached):
                preempted = True
                continue
            states.waiting.pop(number)
            states.start(sequence, cached)
            budget -= self._assign(work, sequence, min(budget, sequence.length - sequence.computed))
            turn = states.waiting.turn(number)
            if turn is not None:
                heappush(turns, turn)
