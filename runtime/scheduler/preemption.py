"""Preemption: chooses running sequences and returns them to the waiting queue.

reason    victims
page      a decoding sequence needs a page: the last running sequence (lowest priority, newest)
slot      an adapter waits too long for a slot: all sequences of the least recently admitted adapter
priority  a sequence of higher priority waits for a row or pages: running sequences of lower priority
owner     an owner waits too long for a row or pages: sequences of the owner with the most running ones
"""

from collections import Counter

from .sequence import Sequence, Status
from .sequence_states import SequenceStates


class Preemption:
    """Preempts running sequences. A preempted one keeps its tokens and is computed again later (preemption by
    recompute), so that its output does not change.

    uses_priorities  whether any sequence has had a priority
    """

    def __init__(self, states: SequenceStates) -> None:
        self.states = states
        self.uses_priorities = False
        self._blocked: tuple[Sequence, int] | None = None  # first sequence without a row or pages, and since which step

    def preempt(self, sequence: Sequence) -> None:
        """Return a running sequence to the waiting queue."""
        self._stop(sequence, Status.WAITING)
        self.states.preemptions += 1
        self.states.waiting.push(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Stop a running sequence that is suspected of a failed step; `failed_steps.Suspects` resumes it."""
        self._stop(sequence, Status.HELD)

    def await_slot(self, sequence: Sequence) -> None:
        """Return a sequence that has computed all it could ahead of its adapter's slot; the prefix cache has it."""
        sequence.ahead = 0
        self._stop(sequence, Status.WAITING)
        self.states.waiting.push(sequence)

    def _stop(self, sequence: Sequence, status: Status) -> None:
        self.states.release(sequence)
        sequence.status = status
        sequence.computed = 0
        sequence.preemptions += 1

    def allocate_page(self, sequence: Sequence) -> bool:
        """Give a decoding sequence its next page; return whether a sequence was preempted for it, perhaps itself."""
        states = self.states
        preempted = False
        while (pages := states.pages.allocate(1)) is None:
            victim = states.running[-1]  # not yet in this step's batch, which is filled in the order of `running`
            self.preempt(victim)
            preempted = True
            if victim is sequence:
                return True
        sequence.pages += pages
        states.rows.set_pages(sequence, len(sequence.pages) - 1)
        return preempted

    def make_room(self) -> None:
        """Preempt for waiting adapters, priorities and owners, before a batch is filled."""
        self._free_slot()
        if self.uses_priorities:
            self._for_priority()
        self._for_owner()

    def _free_slot(self) -> None:
        states = self.states
        number = states.residency.take_vacated(self._progressed)
        if number is not None:
            for sequence in [each for each in states.running if each.number == number and not each.ahead]:
                self.preempt(sequence)

    def _progressed(self, number: int) -> bool:
        """Return whether all running sequences of an adapter have progressed since their admission."""
        return all(
            sequence.has_progressed
            for sequence in self.states.running
            if sequence.number == number and not sequence.ahead
        )

    def _for_priority(self) -> None:
        states = self.states
        first = states.waiting.first() if states.running else None
        if first is None or first.in_flight or (first.number >= 0 and not states.slots.is_resident(first.number)):
            return
        while states.running and states.running[-1].priority > first.priority and not self._has_room(first):
            self.preempt(states.running[-1])

    def _for_owner(self) -> None:
        states = self.states
        if self._blocked is None or states.step - self._blocked[1] < states.limits.owner_patience:
            return
        first, _ = self._blocked
        self._blocked = None
        if first.status is not Status.WAITING or first.in_flight:
            return
        running = Counter(sequence.owner for sequence in states.running)
        while not self._has_room(first):
            # with at least two more it still runs as many afterwards, so that owners do not preempt each other forever
            victims = [
                sequence
                for sequence in states.running
                if running[sequence.owner] >= running[first.owner] + 2 and sequence.priority >= first.priority
            ]
            if not victims:
                return
            victim = max(victims, key=lambda sequence: (running[sequence.owner], sequence.order))
            running[victim.owner] -= 1
            self.preempt(victim)

    def _has_room(self, sequence: Sequence) -> bool:
        states = self.states
        return states.rows.num_free > 0 and states.fits(sequence, states.prefix_cache.match(sequence))

    def note_blocked(self, sequence: Sequence | None) -> None:
        """Note the first waiting sequence without a row or pages. The wait counts per owner."""
        if sequence is None:
            self._blocked = None
        elif self._blocked is None or self._blocked[0].owner != sequence.owner:
            self._blocked = sequence, self.states.step
        else:
            self._blocked = sequence, self._blocked[1]
