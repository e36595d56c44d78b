"""Loads, replaces and unloads adapters as the folders of a directory change, for `--lora-modules-from`."""

import asyncio
import logging
from collections.abc import Mapping

from ...api.errors import EngineDeadError, OverloadedError, RequestError, ServerError
from ..interfaces import Engines
from .adapter_root import AdapterRoot

_log = logging.getLogger("sidestream.gateway")
SCAN_SECONDS = 2.0
_RETRIED = frozenset({"adapter_in_use", "loading", "draining"})


class AdapterFolder:
    """The adapters of one directory, each in a folder of its name.

    directory   scanned every SCAN_SECONDS
    versions    name -> version of the adapters that the engines should have loaded at their start
    engines     each difference becomes a change as by /v1/load_lora_adapter or /v1/unload_lora_adapter

    A folder is loaded when two scans in a row have found the same files, so that no half-written adapter is loaded. An
    adapter that is refused is tried again when its files change.
    """

    def __init__(self, directory: str, versions: Mapping[str, str], engines: Engines) -> None:
        self._root, self._engines = AdapterRoot(directory), engines
        self._applied, self._is_checked = dict(versions), False
        self._scanned: Mapping[str, str] = versions

    async def run(self) -> None:
        """Follow the directory until this is cancelled."""
        while True:
            await asyncio.sleep(SCAN_SECONDS)
            try:
                await self.update()
            except OSError as problem:  # keep the adapters of the last scan
                _log.warning("the directory of adapters cannot be read: %s", problem)

    async def update(self) -> None:
        """Scan the directory and apply what has changed. Raises OSError if it cannot be read."""
        offers = await asyncio.to_thread(self._root.scan)
        former, self._scanned = self._scanned, {name: offer.version for name, offer in offers.items()}
        if (await self._engines.health()).status != "ok":
            return
        if not self._is_checked:  # an engine starts without the adapters that it cannot read
            self._applied = {name: self._applied[name] for name in self._applied if await self._engines.adapter(name)}
            self._is_checked = True
        for name in self._applied.keys() - offers.keys() - former.keys():
            if await self._change(name, None):
                del self._applied[name]
        for name, offer in offers.items():
            is_stable = former.get(name) == offer.version
            if is_stable and self._applied.get(name) != offer.version and await self._change(name, offer.path):
                self._applied[name] = offer.version

    async def _change(self, name: str, path: str | None) -> bool:
        """Load an adapter, or unload it without a path. Return False if the change must be tried again."""
        try:
            if path is not None:
                await self._engines.load_adapter(name, path, replace=True)
            elif await self._engines.adapter(name) is not None:
                await self._engines.unload_adapter(name)
        except (EngineDeadError, OverloadedError, TimeoutError):
            return False
        except (ServerError, RequestError) as problem:
            if problem.code in _RETRIED:
                return False
            _log.warning("adapter %r of %s is not %sloaded: %s", name, self._root.location, "un" * (not path), problem)
            return True
        _log.info("adapter %r of %s is %sloaded", name, self._root.location, "un" * (not path))
        return True
