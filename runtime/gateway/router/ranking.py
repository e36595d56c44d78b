"""The least loaded of many engines, and sets of engines to draw from, while loads change all the time."""

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class Ranking(Generic[T]):
    """Members by a key that changes; the one with the smallest key is found in logarithmic time.

    A heap whose outdated entries are passed over. Equal keys: any of them, so that several routers that know the same
    do not all take the same.
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
        self._push(member, key)
        if len(self._heap) > 64 + 4 * len(self._keys):
            self._heap = [entry for entry in self._heap if self._keys.get(entry[3]) == entry[0]]
            heapify(self._heap)

    def drop(self, member: T) -> None:
        """Take a member out; nothing happens if it is not in."""
        self._keys.pop(member, None)

    def first(self, fits: Callable[[T], bool]) -> T | None:
        """The member with the smallest key that fits."""
        aside: list[tuple[float, float, int, T]] = []
        found: T | None = None
        heap, keys = self._heap, self._keys
        while heap:
            entry = heap[0]
            if keys.get(entry[3]) == entry[0]:
                if fits(entry[3]):
                    found = entry[3]
                    break
                aside.append(entry)
            heappop(heap)
        for entry in aside:
            heappush(heap, entry)
        return found

    def _push(self, member: T, key: float) -> None:
        self._entries += 1
        heappush(self._heap, (key, self._source.random(), self._entries, member))


class Pool(Generic[T]):
    """A set from which some members can be drawn at random in constant time."""

    __slots__ = ("_members", "_places")

    def __init__(self) -> None:
        self._members: list[T] = []
        self._places: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._places

    def add(self, member: T) -> None:
        """Put a member in, unless it is."""
        if member not in self._places:
            self._places[member] = len(self._members)
            self._members.append(member)

    def discard(self, member: T) -> None:
        """Take a member out, if it is in."""
        place = self._places.pop(member, None)
        if place is not None:
            last = self._members.pop()
            if last is not member:
                self._members[place] = last
                self._places[last] = place

    def some(self, count: int, source: random.Random) -> list[T]:
        """All members, or `count` drawn ones if there are more."""
        members = self._members
        return (
            members if len(members) <= count else [members[int(source.random() * len(members))] for _ in range(count)]
        )
