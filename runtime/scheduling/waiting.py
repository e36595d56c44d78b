"""Who is admitted next: by priority, then fairly between adapters, then by arrival."""

from heapq import heapify, heappop, heappush

from .sequence import Sequence


class WaitingQueues:
    """Waiting sequences, a queue for each adapter (by number; the base model, -1, counts as one).

    Among equal priorities the adapter comes first that was served the fewest tokens since it became active, so that a
    popular adapter's backlog cannot hold up another's few requests; within an adapter, and among adapters that were
    served alike, the oldest. An adapter is active while it has an unfinished sequence; one that becomes active starts
    level with the least served of the others, neither with a debt nor with savings.
    """

    def __init__(self) -> None:
        self._queues: dict[int, list[tuple[int, int, Sequence]]] = {}
        self._served: dict[int, int] = {}
        self._unfinished: dict[int, int] = {}
        self._dead = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, sequence: Sequence) -> None:
        """A new sequence: it waits, and counts as unfinished until `leave`."""
        number = sequence.number
        if number not in self._unfinished:
            self._unfinished[number] = 0
            self._served[number] = min(self._served.values(), default=0)
        self._unfinished[number] += 1
        self.push(sequence)

    def leave(self, sequence: Sequence, waiting: bool) -> bool:
        """A sequence is finished (`waiting`: before it was admitted); returns whether it was its adapter's last."""
        number = sequence.number
        if waiting:
            self._count -= 1
            self._dead += 1
            if self._dead > 64 + self._count:
                self._bury()
        self._unfinished[number] -= 1
        if self._unfinished[number]:
            return False
        del self._unfinished[number], self._served[number]
        return True

    def push(self, sequence: Sequence) -> None:
        """Wait (again): a preempted sequence comes before those that arrived later."""
        heappush(self._queues.setdefault(sequence.number, []), (*sequence.order, sequence))
        self._count += 1

    def pop(self, number: int) -> Sequence:
        """Take the adapter's first sequence out."""
        sequence = heappop(self._queues[number])[-1]
        self._count -= 1
        return sequence

    def head(self, number: int) -> Sequence | None:
        """The adapter's first sequence."""
        queue = self._queues.get(number)
        while queue and queue[0][-1].finished:
            heappop(queue)
            self._dead -= 1
        if queue:
            return queue[0][-1]
        self._queues.pop(number, None)
        return None

    def turn(self, number: int) -> tuple[int, int, int, int] | None:
        """When it is the adapter's turn: (priority, tokens served, arrival, number), the least first; None if nobody
        waits.
        """
        sequence = self.head(number)
        return None if sequence is None else (sequence.priority, self._served[number], sequence.arrival, number)

    def turns(self) -> list[tuple[int, int, int, int]]:
        """All adapters' turns, as a heap."""
        turns = [turn for number in list(self._queues) if (turn := self.turn(number)) is not None]
        heapify(turns)
        return turns

    def first(self) -> Sequence | None:
        """The sequence whose turn it is."""
        turn = min((turn for number in list(self._queues) if (turn := self.turn(number)) is not None), default=None)
        return None if turn is None else self.head(turn[-1])

    def charge(self, number: int, tokens: int) -> None:
        """An active adapter was served so many tokens."""
        self._served[number] += tokens

    def of(self, number: int) -> list[Sequence]:
        """All that wait for an adapter, in order."""
        return [
            sequence
            for _, _, sequence in sorted(self._queues.get(number, ()), key=lambda entry: entry[:2])
            if not sequence.finished
        ]

    def active(self, number: int) -> bool:
        """Whether the adapter has an unfinished sequence."""
        return number in self._unfinished

    def _bury(self) -> None:
        for number, queue in list(self._queues.items()):
            alive = [entry for entry in queue if not entry[-1].finished]
            heapify(alive)
            self._queues[number] = alive
            if not alive:
                del self._queues[number]
        self._dead = 0
