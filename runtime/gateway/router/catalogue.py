"""The adapters that were loaded and unloaded through the router: engines that come back without them get them again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...protocol.messages import AdapterInfo


@dataclass(frozen=True, slots=True)
class Step:
    """An adapter to be loaded from `path`, or (None) unloaded."""

    name: str
    path: str | None
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """An adapter that an engine loads when the first request for it comes.

    path      where it lies, for all engines or for the process that fetches it
    version   changes when its files may have changed
    rank      for lists
    """

    name: str
    path: str
    version: str
    rank: int


class Catalogue:
    """What every engine should have, next to what it was started with; `offers`: what it may be asked for besides."""

    def __init__(self) -> None:
        self.offers: Mapping[str, Offer] = {}
        self._loaded: dict[str, tuple[str, str]] = {}  # name -> path, content
        self._unloaded: set[str] = set()

    def loaded(self, name: str, path: str, content: str) -> None:
        """An adapter was loaded through the router; `content`: the hash that the engines told of it."""
        self._loaded[name] = path, content
        self._unloaded.discard(name)

    def unloaded(self, name: str) -> None:
        """An adapter was unloaded through the router."""
        self._loaded.pop(name, None)
        self._unloaded.add(name)

    def offered(self, offers: Mapping[str, Offer]) -> None:
        """These are all that are offered now; of the former ones those that are missing are unloaded."""
        self._unloaded |= self.offers.keys() - offers.keys()
        self._unloaded -= offers.keys()
        self.offers = offers

    def gone(self, name: str) -> bool:
        """Whether requests may not name it any more, although an engine may still have it."""
        return name in self._unloaded

    def missing(self, adapters: Iterable[AdapterInfo]) -> list[Step]:
        """What an engine that has these adapters lacks. One that answers requests is unloaded when they are done."""
        there = {info.name: info for info in adapters}
        steps = [
            Step(name, None)
            for name in self._unloaded
            if name in there and not there[name].running and not there[name].waiting
        ]
        for name, (path, content) in self._loaded.items():
            if name not in there or there[name].content != content:
                steps.append(Step(name, path, replace=name in there))
        return steps
