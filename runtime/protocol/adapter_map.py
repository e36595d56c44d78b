"""The adapters that clients have loaded and unloaded, as a last-writer-wins map. No I/O.

Servers and gateways each have a map and exchange entries. Of two entries of a name the one with the later stamp wins.
So maps that have received the same entries are equal, in whatever order. Stamps come from hybrid logical clocks
(Kulkarni et al., "Logical Physical Clocks", 2014): a change has a later stamp than every change known to its author.
"""

import time
from collections.abc import Callable, Iterable
from typing import Annotated

from msgspec import Meta, Struct

MAX_AHEAD_SECONDS = 60.0
"""Limit on the difference between a stamp and the clock of its receiver."""
MAX_TOMBSTONES = 1024
"""Number of unloaded names that a map remembers. A server that was not reachable while more names were unloaded can
bring the first ones back.
"""
UPDATE_PATH = "update:"
"""Start of the location of an adapter that a client has updated from its memory; its version follows. Only the server
that was updated has it.
"""
MAX_COUNTER = (1 << 31) - 1


class Stamp(Struct, frozen=True, array_like=True, order=True):
    """Time of a change: milliseconds since the epoch, a counter within them, and the clock's node for ties."""

    milliseconds: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0
    counter: Annotated[int, Meta(ge=0, le=MAX_COUNTER)] = 0
    node: Annotated[str, Meta(max_length=64)] = ""

    @property
    def undo(self) -> "Stamp":
        """The stamp that undoes this change: later than it, and earlier than all changes after it."""
        return Stamp(self.milliseconds, self.counter, f"{self.node}~")

    @property
    def undone(self) -> "Stamp":
        """The stamp of the change that this one undoes, possibly again; itself if it undoes none."""
        return Stamp(self.milliseconds, self.counter, self.node.rstrip("~"))


FIRST = Stamp()


class AdapterEntry(Struct, frozen=True, omit_defaults=True):
    """The last change of a name.

    path      directory that it was loaded from; None: it was unloaded
    content   hash of the loaded config and weights; "" if it was unloaded or no server has read it yet
    """

    name: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+\Z")]
    stamp: Stamp
    path: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*\Z")] | None = None
    content: Annotated[str, Meta(max_length=256)] = ""

    @property
    def _order(self) -> tuple[Stamp, str, str]:
        """Entries of one stamp differ only if servers read different files."""
        return self.stamp, self.content, self.path or ""

    @property
    def is_update(self) -> bool:
        """Whether the adapter was updated from a client's memory."""
        return self.path is not None and self.path.startswith(UPDATE_PATH)

    def is_newer(self, other: "AdapterEntry | None") -> bool:
        """Return whether this entry replaces `other`."""
        return other is None or self._order > other._order


class StampError(ValueError):
    """A stamp is too far ahead of the receiver's clock."""


class HybridClock:
    """Issues stamps later than `last`. `node`: unique name of this clock; `now`: seconds since the epoch."""

    def __init__(self, node: str, now: Callable[[], float] = time.time, last: Stamp = FIRST) -> None:
        self._node, self._now, self._last = node, now, last

    def tick(self) -> Stamp:
        """Return a stamp that is later than all that this clock has issued or observed."""
        milliseconds = int(self._now() * 1000)
        last = self._last
        if milliseconds > last.milliseconds:
            self._last = Stamp(milliseconds, 0, self._node)
        elif last.counter < MAX_COUNTER:
            self._last = Stamp(last.milliseconds, last.counter + 1, self._node)
        else:
            self._last = Stamp(last.milliseconds + 1, 0, self._node)
        return self._last

    def observe(self, stamp: Stamp) -> None:
        """Record a stamp of another clock. Raises StampError if it is too far ahead of this one.

        Stamps up to the last one are accepted: both clocks may have been set back since.
        """
        ahead = stamp.milliseconds / 1000 - self._now()
        if ahead > MAX_AHEAD_SECONDS and stamp.milliseconds > self._last.milliseconds:
            raise StampError(
                f"the stamp of this change is {ahead:.0f} s ahead of the server's clock; at most "
                f"{MAX_AHEAD_SECONDS:g} s are allowed. Synchronize the clocks"
            )
        self._last = max(self._last, stamp)


class AdapterMap:
    """Name -> last entry.

    entries    in the order in which they were merged here
    sequence   number of merges so far; `changes` returns those after a number
    """

    def __init__(self, entries: Iterable[AdapterEntry] = (), max_tombstones: int = MAX_TOMBSTONES) -> None:
        self.entries: dict[str, AdapterEntry] = {}
        self.sequence = 0
        self._merged: dict[str, int] = {}
        self._former: dict[str, AdapterEntry] = {}
        self._max_tombstones = max_tombstones
        self._tombstones = 0
        self._floor = Stamp()  # of the latest tombstone that was dropped
        for entry in entries:
            self.merge(entry)

    def merge(self, entry: AdapterEntry) -> bool:
        """Keep an entry if it is newer than the name's own. Returns whether it is."""
        former = self.entries.get(entry.name)
        if not entry.is_newer(former) or self.is_outdated(entry.name, entry.stamp):
            return False
        self._remove(entry.name)
        if former is not None and former.stamp.undone != entry.stamp.undone:
            self._former[entry.name] = former
        self.sequence += 1
        self.entries[entry.name], self._merged[entry.name] = entry, self.sequence
        if entry.path is None:
            self._tombstones += 1
            if self._tombstones > self._max_tombstones:
                self._drop_oldest_tombstone()
        return True

    def former(self, name: str) -> AdapterEntry | None:
        """Return what the last change of a name replaced here; where that undoes a change, what this one replaced.

        Several routers pass on a change and its undoing. Only this map may have what was replaced.
        """
        return self._former.get(name)

    def is_outdated(self, name: str, stamp: Stamp) -> bool:
        """Return whether a change of this name is older than its last one, or than a tombstone that was dropped."""
        former = self.entries.get(name)
        return stamp < (self._floor if former is None else former.stamp)

    def _remove(self, name: str) -> None:
        former = self.entries.pop(name, None)
        if former is not None:
            del self._merged[name]
            self._tombstones -= former.path is None

    def _drop_oldest_tombstone(self) -> None:
        oldest = min((each for each in self.entries.values() if each.path is None), key=lambda each: each.stamp)
        self._floor = max(self._floor, oldest.stamp)
        self._remove(oldest.name)
        self._former.pop(oldest.name, None)

    def loaded(self, name: str) -> AdapterEntry | None:
        """Return the entry of a loaded adapter; None if it was not loaded, or unloaded."""
        entry = self.entries.get(name)
        return None if entry is None or entry.path is None else entry

    def is_unloaded(self, name: str) -> bool:
        """Return whether the last change unloaded this name."""
        entry = self.entries.get(name)
        return entry is not None and entry.path is None

    def changes(self, after: int, limit: int) -> tuple[list[AdapterEntry], int]:
        """Return up to `limit` entries that were merged after a sequence number, oldest first, and the last's number.

        A number that this map has not reached is one of another map: all entries are returned.
        """
        if after > self.sequence:
            after = 0
        found: list[AdapterEntry] = []
        for entry in reversed(self.entries.values()):
            if self._merged[entry.name] <= after:
                break
            found.append(entry)
        found = found[::-1][:limit]
        return found, self._merged[found[-1].name] if len(found) == limit else self.sequence
