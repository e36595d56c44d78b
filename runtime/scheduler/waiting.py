"""Who is admitted next: by priority, then fairly between clients, then between adapters, then by arrival."""

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from .sequence import Sequence

Key = tuple[str, int]
"""(owner, adapter number) of a queue."""
Turn = tuple[int, int, int, int, Key]
"""When it is a queue's turn: (priority, tokens its owner was served, tokens its adapter was served, arrival, key), the
least first.
"""
K = TypeVar("K")


class Shares(Generic[K]):
    """How many tokens each active party was served. A party is active while it has an unfinished sequence.

    One that becomes active starts level with the least served of the others, neither with a debt nor with savings.
    """

    def __init__(self) -> None:
        self.served: dict[K, int] = {}
        self._unfinished: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self.served)

    def __contains__(self, party: K) -> bool:
        return party in self.served

    def enter(self, party: K) -> None:
        """A new sequence of this party."""
        if party not in self.served:
            self._unfinished[party] = 0
            self.served[party] = min(self.served.values(), default=0)
        self._unfinished[party] += 1

    def leave(self, party: K) -> bool:
        """A sequence is finished; returns whether it was its party's last."""
        self._unfinished[party] -= 1
        if self._unfinished[party]:
            return False
        del self._unfinished[party], self.served[party]
        return True


class WaitingQueues:
    """Waiting sequences, a queue for each owner and adapter (by number; the base model, -1, counts as one).

    Among equal priorities the owner comes first that was served the fewest tokens, so that one client's backlog cannot
    hold up another's few requests; of one owner's queues the one whose adapter was served the fewest, for
    any owner; within a queue, and among those that were served alike, the oldest.
    """

    def __init__(self) -> None:
        self._queues: dict[int, dict[str, list[tuple[int, int, Sequence]]]] = {}
        self._owners: Shares[str] = Shares()
        self._adapters: Shares[int] = Shares()
        self._waiting: Counter[str] = Counter()
        self._dead = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def num_owners(self) -> int:
        """Owners with an unfinished sequence."""
        return len(self._owners)

    def held(self, owner: str) -> int:
        """Waiting sequences of one owner."""
        return self._waiting[owner]

    def held_by(self, prefix: str) -> int:
        """Waiting sequences of the owners whose names begin so."""
        return sum(count for owner, count in self._waiting.items() if owner.startswith(prefix))

    def enter(self, sequence: Sequence, queued: bool = True) -> None:
        """A new sequence: it waits (`queued`), and counts as unfinished until `leave`."""
        self._owners.enter(sequence.owner)
        self._adapters.enter(sequence.number)
        if queued:
            self.push(sequence)

    def leave(self, sequence: Sequence, waiting: bool) -> bool:
        """A sequence is finished (`waiting`: before it was admitted); returns whether it was its adapter's last."""
        if waiting:
            self._gone(sequence.owner)
            self._dead += 1
            if self._dead > 64 + self._count:
                self._bury()
        self._owners.leave(sequence.owner)
        return self._adapters.leave(sequence.number)

    def push(self, sequence: Sequence) -> None:
        """Wait (again): a preempted sequence comes before those that arrived later."""
        queue = self._queues.setdefault(sequence.number, {}).setdefault(sequence.owner, [])
        heappush(queue, (*sequence.order, sequence))
        self._waiting[sequence.owner] += 1
        self._count += 1

    def pop(self, key: Key) -> Sequence:
        """Take the first sequence of a queue out."""
        owner, number = key
        sequence = heappop(self._queues[number][owner])[-1]
        self._gone(owner)
        return sequence

    def _gone(self, owner: str) -> None:
        self._count -= 1
        self._waiting[owner] -= 1
        if not self._waiting[owner]:
            del self._waiting[owner]

    def head(self, key: Key) -> Sequence | None:
        """The first sequence of a queue."""
        owner, number = key
        queues = self._queues.get(number, {})
        queue = queues.get(owner)
        while queue and queue[0][-1].finished:
            heappop(queue)
            self._dead -= 1
        if queue:
            return queue[0][-1]
        if queues.pop(owner, None) is not None and not queues:
            del self._queues[number]
        return None

    def heads(self) -> Iterator[Sequence]:
        """The first sequence of each queue."""
        for key in [(owner, number) for number, queues in self._queues.items() for owner in queues]:
            sequence = self.head(key)
            if sequence is not None:
                yield sequence

    def turn(self, key: Key) -> Turn | None:
        """When it is the queue's turn; None if nobody waits in it."""
        sequence = self.head(key)
        return None if sequence is None else self._turn(sequence)

    def _turn(self, sequence: Sequence) -> Turn:
        owner, number = sequence.owner, sequence.number
        served = self._owners.served[owner], self._adapters.served[number]
        return (sequence.priority, *served, sequence.arrival, (owner, number))

    def turns(self) -> list[Turn]:
        """All queues' turns, as a heap."""
        turns = [self._turn(sequence) for sequence in self.heads()]
        heapify(turns)
        return turns

    def first(self) -> Sequence | None:
        """The sequence whose turn it is."""
        return min(self.heads(), key=self._turn, default=None)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """So many tokens of an unfinished sequence were served."""
        self._owners.served[sequence.owner] += tokens
        self._adapters.served[sequence.number] += tokens

    def of(self, number: int) -> list[Sequence]:
        """All that wait for an adapter, in order."""
        waiting = [entry[-1] for queue in self._queues.get(number, {}).values() for entry in queue]
        return sorted((sequence for sequence in waiting if not sequence.finished), key=lambda sequence: sequence.order)

    def active(self, number: int) -> bool:
        """Whether the adapter has an unfinished sequence."""
        return number in self._adapters

    def _bury(self) -> None:
        for number, queues in list(self._queues.items()):
            for owner, queue in list(queues.items()):
                alive = [entry for entry in queue if not entry[-1].finished]
                heapify(alive)
                queues[owner] = alive
                if not alive:
                    del queues[owner]
            if not queues:
                del self._queues[number]
        self._dead = 0
