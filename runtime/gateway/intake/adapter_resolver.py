"""Loads adapters that requests name and no engine has, from the folders of their names, for `--resolve-adapters`."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence

from ...api.errors import ServerError
from ..interfaces import Engines, GatewayError
from ..router.adapter_root import AdapterRoot
from .fair_queue import FairQueue

_log = logging.getLogger("sidestream.gateway")
LOADS, LOADS_PER_OWNER = 16, 1
RETRY_SECONDS = 0.2
LOAD_SECONDS = 600.0
UNREADABLE = (
    "no engine has an adapter of this name, and the server's --adapter-root cannot be read at this moment; try again, "
    "or see the server's log"
)


class AdapterResolver:
    """Loads an adapter at its first request. Belongs to one asyncio loop.

    roots   directories and addresses with a folder for each adapter; the first one with the folder is used

    At most LOADS_PER_OWNER adapters are loaded for an owner at a time.
    """

    def __init__(self, roots: Sequence[str], engines: Engines) -> None:
        self._roots, self._engines = [AdapterRoot(root) for root in roots], engines
        self._turns = FairQueue(LOADS, LOADS_PER_OWNER)

    async def resolve(self, name: str, owner: str, connected: Callable[[Awaitable[None]], Awaitable[None]]) -> None:
        """Load the adapter, unless an engine has it or no root has its folder.

        owner       tag of the request's owner
        connected   awaits its argument while the client is connected

        Raises ServerError if the engines refuse the adapter, GatewayError 503 if a root cannot be read.
        """
        await connected(self._turns.start(owner))
        # the turn ends with the load: a client that disconnects does not get another one meanwhile
        load = asyncio.create_task(self._load(name))
        load.add_done_callback(lambda load: self._end(owner, load))
        await asyncio.shield(load)

    def _end(self, owner: str, load: asyncio.Task[None]) -> None:
        self._turns.end(owner)
        if not load.cancelled():
            load.exception()  # the client may have disconnected

    async def _load(self, name: str) -> None:
        async with asyncio.timeout(LOAD_SECONDS):
            while await self._engines.adapter(name) is None:
                try:
                    path = await asyncio.to_thread(self._find, name)
                except OSError as problem:
                    _log.warning("adapter %r is not looked up, since its root cannot be read: %s", name, problem)
                    raise GatewayError(503, UNREADABLE, "server_error", "adapter_root_unreadable") from problem
                if path is None:
                    return
                try:
                    await self._engines.load_adapter(name, path, replace=False)
                    _log.info("adapter %r is loaded from %s at its first request", name, os.path.dirname(path))
                except ServerError as problem:
                    if problem.code != "adapter_in_use":
                        raise
                    await asyncio.sleep(RETRY_SECONDS)  # another request or gateway loads or unloads it

    def _find(self, name: str) -> str | None:
        return next((path for root in self._roots if (path := root.find(name)) is not None), None)
