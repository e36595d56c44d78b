"""The adapters that every engine should have: loaded through any server or gateway, or offered by a fleet's root."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec import structs

from ...api.adapter_sum import SUM_PATH, sum_content, sum_parts
from ...protocol.adapter_map import AdapterEntry, AdapterMap, HybridClock, StampError
from ...protocol.messages import AdapterInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OfferedAdapter:
    """An adapter that an engine loads at its first request.

    path      directory on all hosts, or address that engines copy
    version   changes when its files may have changed
    rank      for listings
    """

    name: str
    path: str
    version: str
    rank: int


class AdapterCatalogue:
    """Last changes of all engines, and changes of this router.

    offered   name -> adapter that is loaded on demand; its changes are not passed on to other engines
    changes   the last change of each name
    """

    def __init__(self, clock: HybridClock | None = None) -> None:
        self.offered: Mapping[str, OfferedAdapter] = {}
        self.changes = AdapterMap()
        self._clock = clock or HybridClock(f"gateway-{os.urandom(6).hex()}")
        self._changing: set[str] = set()

    def adopt(self, entry: AdapterEntry) -> None:
        """Merge a change that an engine has applied. One with a stamp far ahead of this clock is ignored."""
        try:
            self._clock.observe(entry.stamp)
        except StampError as problem:
            _log.warning("adapter %r: its change is not passed on: %s", entry.name, problem)
            return
        self.changes.merge(entry)

    def new_entry(self, name: str, path: str | None = None, content: str = "") -> AdapterEntry:
        """Return a change that is later than all known ones. It is not merged before an engine has applied it."""
        return AdapterEntry(name, self._clock.tick(), path, content)

    def undo(self, entry: AdapterEntry, former: AdapterEntry | None) -> AdapterEntry:
        """Return a change that restores `former`: later than `entry`, and earlier than all changes after `entry`."""
        stamp = entry.stamp.undo
        return AdapterEntry(entry.name, stamp) if former is None else structs.replace(former, stamp=stamp)

    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Pass on no change of a name while this router changes it."""
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)

    def set_offered(self, offered: Mapping[str, OfferedAdapter]) -> None:
        """Replace the offered adapters. Those that are no longer offered are unloaded."""
        for name in self.offered.keys() - offered.keys():
            self.changes.merge(self.new_entry(name))
        self.offered = offered

    def is_unloaded(self, name: str) -> bool:
        """Return whether requests may no longer name it, or an adapter of the sum, even if an engine still has it."""
        return any(self.changes.is_unloaded(part) and part not in self.offered for part, _ in sum_parts(name))

    def required_content(self, name: str | None) -> str:
        """Return the content hash of the version that answers requests; "" for any version."""
        entry = None if name is None else self.changes.loaded(name)
        if entry is not None and not is_named_sum(entry):
            return entry.content
        name = name if entry is None or entry.path is None else entry.path.removeprefix(SUM_PATH)
        loaded = [] if name is None else [(self.changes.loaded(part), weight) for part, weight in sum_parts(name)]
        contents = [("" if part is None else part.content, weight) for part, weight in loaded]
        return sum_content(contents) if contents and all(content for content, _ in contents) else ""

    def missing(self, held: AdapterMap, adapters: Mapping[str, AdapterInfo]) -> list[AdapterEntry]:
        """Return the changes that an engine lacks, given its own changes and its adapters."""
        found = []
        for entry in self.changes.entries.values():
            # no other engine can read an update
            if entry.name in self._changing or entry.name in self.offered or entry.is_update:
                continue
            info = adapters.get(entry.name)
            has_content = info is not None and (is_named_sum(entry) or info.content == entry.content)
            is_served = info is None if entry.path is None else has_content
            own = held.entries.get(entry.name)
            # an engine can have the entry without its adapter: the files could not be read after a restart
            is_missing = entry.is_newer(own) if is_served else own is None or entry.stamp >= own.stamp
            if is_missing:
                found.append(entry)
        return found


def is_named_sum(entry: AdapterEntry) -> bool:
    """Return whether a change gives a name to a sum of adapters. It has no content: that of its adapters counts."""
    return entry.path is not None and entry.path.startswith(SUM_PATH)
