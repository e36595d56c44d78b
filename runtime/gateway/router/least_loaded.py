"""The least loaded of many engines, and random subsets of them, while loads change all the time."""

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class LoadHeap(Generic[T]):
    """Members by a changing key. Finds the smallest key in logarithmic time.

    It is a heap that skips outdated entries. Ties are broken at random, so that several routers with the same state do
    not all choose the same member.
    """

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._keys: dict[T, float] = {}
        self._heap: list[tuple[float, float, int, T]] = []
        self._entries = 0

    def __contains__(self, member: object) -> bool:
        return member in self._keys

    def put(self, member: T, key: float) -> None:
        """Add a member, or change its key."""
        if self._keys.get(member) == key:
            return
        self._keys[member] = key
        self._entries += 1
        heappush(self._heap, (key, self._source.random(), self._entries, member))
        if len(self._heap) > 64 + 4 * len(self._keys):
            self._heap = [entry for entry in self._heap if self._keys.get(entry[3]) == entry[0]]
            heapify(self._heap)

    def discard(self, member: T) -> None:
        """Remove a member if it is present."""
        self._keys.pop(member, None)

    def first(self, fits: Callable[[T], bool]) -> T | None:
        """Return the member with the smallest key for which `fits` returns True."""
        skipped: list[tuple[float, float, int, T]] = []
        found: T | None = None
        heap, keys = self._heap, self._keys
        while heap:
            entry = heap[0]
            if keys.get(entry[3]) == entry[0]:
                if fits(entry[3]):
                    found = entry[3]
                    break
                skipped.append(entry)
            heappop(heap)
        for entry in skipped:
            heappush(heap, entry)
        return found


class RandomPool(Generic[T]):
    """A set that returns random members in constant time."""

    __slots__ = ("_indices", "_members")

    def __init__(self) -> None:
        self._members: list[T] = []
        self._indices: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._indices

    def add(self, member: T) -> None:
        """Add a member if it is not present."""
        if member not in self._indices:
            self._indices[member] = len(self._members)
            self._members.append(member)

    def discard(self, member: T) -> None:
        """Remove a member if it is present."""
        index = self._indices.pop(member, None)
        if index is not None:
            last = self._members.pop()
            if last is not member:
                self._members[index] = last
                self._indices[last] = index

    def some(self, count: int, source: random.Random) -> list[T]:
        """Return all members, or `count` random ones if there are more."""
        members = self._members
        return (
            members if len(members) <= count else [members[int(source.random() * len(members))] for _ in range(count)]
        )
