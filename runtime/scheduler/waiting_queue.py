"""Order of admission: by priority, then fairly between owners, then between adapters, then by arrival."""

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from .sequence import Sequence

Key = tuple[str, int]
"""(owner, adapter number) of a queue."""
Turn = tuple[int, int, int, int, Key]
"""Sort key of a queue: (priority, tokens served to its owner, tokens served to its adapter, arrival, key)."""
K = TypeVar("K")
MAX_DEBT = 1 << 15
"""Tokens that another party may be served ahead of one that was alone before."""


class Shares(Generic[K]):
    """Tokens served to each active party; a party is active while it has an unfinished sequence.

    A new party starts with the least of the others' numbers, so that it has neither debt nor credit. `limit_debts`
    keeps all numbers within MAX_DEBT of the least one: a party can be served for hours while another one's sequences
    do not wait, or wait with a lower priority, and must not be last until that one has caught up.
    """

    def __init__(self) -> None:
        self.served: dict[K, int] = {}
        self._unfinished: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self.served)

    def __contains__(self, party: K) -> bool:
        return party in self.served

    def add(self, party: K) -> None:
        """Count a new sequence of this party."""
        if party not in self.served:
            self._unfinished[party] = 0
            self.served[party] = min(self.served.values(), default=0)
        self._unfinished[party] += 1

    def limit_debts(self) -> None:
        """Lower the numbers above the least one plus MAX_DEBT."""
        most = min(self.served.values(), default=0) + MAX_DEBT
        if max(self.served.values(), default=0) > most:
            self.served = {party: min(served, most) for party, served in self.served.items()}

    def remove(self, party: K) -> bool:
        """Count a finished sequence; return whether it was the party's last."""
        self._unfinished[party] -= 1
        if self._unfinished[party]:
            return False
        del self._unfinished[party], self.served[party]
        return True


class WaitingQueues:
    """Waiting sequences, a queue for each owner and adapter (by number; the base model, -1, counts as one).

    With equal priorities the owner with the fewest served tokens is first, so that one client's backlog cannot delay
    another's few requests. Of an owner's queues the one of the adapter with the fewest served tokens (of all owners)
    is first; within a queue, and at equal shares, the oldest sequence.
    """

    def __init__(self) -> None:
        self._queues: dict[int, dict[str, list[tuple[int, int, Sequence]]]] = {}
        self._owners: Shares[str] = Shares()
        self._adapters: Shares[int] = Shares()
        self._waiting: Counter[str] = Counter()
        self._num_finished = 0  # finished sequences that are still in a queue
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def num_owners(self) -> int:
        """Owners with an unfinished sequence."""
        return len(self._owners)

    def held(self, owner: str) -> int:
        """Return the number of waiting sequences of one owner."""
        return self._waiting[owner]

    def held_by(self, prefix: str) -> int:
        """Return the number of waiting sequences of all owners with this prefix."""
        return sum(count for owner, count in self._waiting.items() if owner.startswith(prefix))

    def count(self, is_wanted: Callable[[int], bool]) -> int:
        """Return the number of waiting sequences of all wanted adapters (by number)."""
        wanted = (queues for number, queues in self._queues.items() if is_wanted(number))
        return sum(not entry[-1].finished for queues in wanted for queue in queues.values() for entry in queue)

    def enter(self, sequence: Sequence, queued: bool = True) -> None:
        """Add a new sequence, to its queue if `queued`. It counts as unfinished until `leave`."""
        self._owners.add(sequence.owner)
        self._adapters.add(sequence.number)
        if queued:
            self.push(sequence)

    def leave(self, sequence: Sequence, waiting: bool) -> bool:
        """Remove a finished sequence, which was `waiting` or not; return whether it was its adapter's last."""
        if waiting:
            self._uncount(sequence.owner)
            self._num_finished += 1
            if self._num_finished > 64 + self._count:
                self._purge()
        self._owners.remove(sequence.owner)
        return self._adapters.remove(sequence.number)

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence; a preempted one comes before those that arrived later."""
        queue = self._queues.setdefault(sequence.number, {}).setdefault(sequence.owner, [])
        heappush(queue, (*sequence.order, sequence))
        self._waiting[sequence.owner] += 1
        self._count += 1

    def pop(self, key: Key) -> Sequence:
        """Remove and return the first sequence of a queue."""
        owner, number = key
        sequence = heappop(self._queues[number][owner])[-1]
        self._uncount(owner)
        return sequence

    def take(self, sequence: Sequence) -> None:
        """Remove a waiting sequence from its queue, for another one."""
        queue = self._queues[sequence.number][sequence.owner]
        queue[:] = [entry for entry in queue if entry[-1] is not sequence]
        heapify(queue)
        self._uncount(sequence.owner)

    def change_adapter(self, old: int, number: int) -> bool:
        """Count an unfinished sequence for another adapter; return whether it was the last one of `old`."""
        self._adapters.add(number)
        return self._adapters.remove(old)

    def _uncount(self, owner: str) -> None:
        self._count -= 1
        self._waiting[owner] -= 1
        if not self._waiting[owner]:
            del self._waiting[owner]

    def head(self, key: Key) -> Sequence | None:
        """Return the first sequence of a queue."""
        owner, number = key
        queues = self._queues.get(number, {})
        queue = queues.get(owner)
        while queue and queue[0][-1].finished:
            heappop(queue)
            self._num_finished -= 1
        if queue:
            return queue[0][-1]
        if queues.pop(owner, None) is not None and not queues:
            del self._queues[number]
        return None

    def heads(self) -> Iterator[Sequence]:
        """Yield the first sequence of each queue."""
        for key in [(owner, number) for number, queues in self._queues.items() for owner in queues]:
            sequence = self.head(key)
            if sequence is not None:
                yield sequence

    def turn(self, key: Key) -> Turn | None:
        """Return a queue's sort key; None if it is empty."""
        sequence = self.head(key)
        return None if sequence is None else self._turn(sequence)

    def _turn(self, sequence: Sequence) -> Turn:
        owner, number = sequence.owner, sequence.number
        served = self._owners.served[owner], self._adapters.served[number]
        return (sequence.priority, *served, sequence.arrival, (owner, number))

    def turns(self, due: Sequence | None = None) -> list[Turn]:
        """Return the sort keys of all queues, as a heap. `due` comes before others of its priority."""
        self._owners.limit_debts()
        self._adapters.limit_debts()
        turns = [self._turn(sequence) for sequence in self.heads() if sequence is not due]
        if due is not None:
            turns.append((due.priority, -1, -1, due.arrival, (due.owner, due.number)))
        heapify(turns)
        return turns

    def oldest(self, accepts: Callable[[int], bool]) -> Sequence | None:
        """Return the oldest sequence of the highest priority that waits for an accepted adapter."""
        waiting = (sequence for sequence in self.heads() if accepts(sequence.number))
        return min(waiting, key=lambda sequence: sequence.order, default=None)

    def first(self) -> Sequence | None:
        """Return the sequence to admit next."""
        return min(self.heads(), key=self._turn, default=None)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Add served tokens to the shares of an unfinished sequence's owner and adapter."""
        self._owners.served[sequence.owner] += tokens
        self._adapters.served[sequence.number] += tokens

    def of(self, number: int) -> list[Sequence]:
        """Return all sequences that wait for an adapter, in order."""
        waiting = [entry[-1] for queue in self._queues.get(number, {}).values() for entry in queue]
        return sorted((sequence for sequence in waiting if not sequence.finished), key=lambda sequence: sequence.order)

    def named(self, adapter: str) -> list[Sequence]:
        """Return all sequences that wait and name this adapter."""
        waiting = [entry[-1] for queues in self._queues.values() for queue in queues.values() for entry in queue]
        return [sequence for sequence in waiting if sequence.adapter == adapter and not sequence.finished]

    def active(self, number: int) -> bool:
        """Return whether the adapter has an unfinished sequence."""
        return number in self._adapters

    def _purge(self) -> None:
        """Remove finished sequences from all queues."""
        for number, queues in list(self._queues.items()):
            for owner, queue in list(queues.items()):
                queues[owner] = [entry for entry in queue if not entry[-1].finished]
                heapify(queues[owner])
                if not queues[owner]:
                    del queues[owner]
            if not queues:
                del self._queues[number]
        self._num_finished = 0
