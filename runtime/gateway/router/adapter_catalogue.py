"""Adapters that were loaded and unloaded through the router, so that restarted engines get the same ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...protocol.messages import AdapterInfo


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """An adapter to load from `path`; None: to unload."""

    name: str
    path: str | None
    replace: bool = False


@dataclass(frozen=True, slots=True)
class OfferedAdapter:
    """An adapter that an engine loads at its first request.

    path      location, for all engines or for the process that fetches it
    version   changes when its files may have changed
    rank      for listings
    """

    name: str
    path: str
    version: str
    rank: int


class AdapterCatalogue:
    """The adapters that every engine should have. `offered`: name -> adapter that is loaded on demand."""

    def __init__(self) -> None:
        self.offered: Mapping[str, OfferedAdapter] = {}
        self._loaded: dict[str, tuple[str, str]] = {}  # name -> path, content
        self._unloaded: set[str] = set()

    def mark_loaded(self, name: str, path: str, content: str) -> None:
        """Record that an adapter was loaded. `content`: hash that the engines reported."""
        self._loaded[name] = path, content
        self._unloaded.discard(name)

    def mark_unloaded(self, name: str) -> None:
        """Record that an adapter was unloaded."""
        self._loaded.pop(name, None)
        self._unloaded.add(name)

    def set_offered(self, offered: Mapping[str, OfferedAdapter]) -> None:
        """Replace the offered adapters. Those that are no longer offered are unloaded."""
        self._unloaded |= self.offered.keys() - offered.keys()
        self._unloaded -= offered.keys()
        self.offered = offered

    def is_unloaded(self, name: str) -> bool:
        """Return whether requests may no longer name it, even if an engine still has it."""
        return name in self._unloaded

    def changes_for(self, adapters: Iterable[AdapterInfo]) -> list[AdapterChange]:
        """Return the changes for an engine with these adapters. An adapter with requests is not unloaded yet."""
        existing = {info.name: info for info in adapters}
        changes = [
            AdapterChange(name, None)
            for name in self._unloaded
            if name in existing and not existing[name].running and not existing[name].waiting
        ]
        for name, (path, content) in self._loaded.items():
            if name not in existing or existing[name].content != content:
                changes.append(AdapterChange(name, path, replace=name in existing))
        return changes
