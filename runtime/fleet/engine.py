"""A replica of the deployment `engine`: it owns its GPU, runs one engine there, and tells where it is reached."""

import asyncio
import contextlib
import logging

from msgspec import structs
from ray import serve

from ...ops.core.kv_layout import PAGE_SIZE
from ..api.errors import ServerError
from ..client.async_client import AsyncClient
from ..server.settings import ServeSettings
from .adapter_root import fetch, fetched_folder
from .engine_process import EngineProcess
from .private_address import leave, private_address, sweep

_log = logging.getLogger("ray.serve")
STOP_SECONDS = 10.0
"""After the drain, before the engine is killed."""
ANSWER_SECONDS = 5.0


class Engine:
    """What Ray Serve starts, asks and stops. It is ready when its programs are captured.

    Tokens never pass through it: HTTP's processes speak with its engine over `docs/protocol.md`.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it, and takes the replica to be ready then
        self, settings: ServeSettings, client_keys: str | None
    ) -> None:
        self._ends = contextlib.AsyncExitStack()  # Ray calls __del__ also where this raises
        self._name = serve.get_replica_context().replica_id.unique_id
        self._settings = structs.replace(settings, bind=private_address(self._name, settings.keys is not None))
        sweep(self._settings.bind)
        self._ends.callback(leave, self._settings.bind)
        self._process = EngineProcess(self._settings, lambda line: _log.info("%s: %s", self._name, line))
        try:
            self._address = await self._process.address()
        except RuntimeError:
            await self._process.drain(0.0)
            raise
        self._load = {"requests": 0.0, "tokens": 0.0}
        self._client = AsyncClient(
            self._address, keys=client_keys, connect_timeout=ANSWER_SECONDS, call_timeout=ANSWER_SECONDS, name="fleet"
        )
        self._ends.push_async_callback(self._client.close)
        self._ends.push_async_callback(self._process.drain, settings.drain_seconds + STOP_SECONDS)

    def record_replica_metadata(self) -> dict[str, str]:
        """What Ray tells all that want to reach this replica."""
        return {"address": self._address}

    def check_health(self) -> None:
        """Raises RuntimeError when the engine is gone: Ray starts another replica then."""
        if self._process.ended.is_set():
            raise RuntimeError("the engine's process has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load that `policy` scales by: open requests, and tokens in the KV cache of those that run. Where the
        engine does not answer, because it is busy or starts again, what it said last.
        """
        with contextlib.suppress(ServerError, TimeoutError):
            told = await self._client.stats()
            self._load = {
                "requests": float(told.get("requests_open", 0)),
                "tokens": float(told.get("pages_in_use", 0) * PAGE_SIZE),
            }
        return self._load

    async def wake(self) -> None:
        """Nothing to do: a request waits for a replica, and here is one."""

    async def fetch(self, replica: str, root: str, folder: str, version: str) -> str:
        """Bring an adapter of a remote root to this host; returns its directory here. `replica`: this one.

        Raises ValueError and what the file system raises.
        """
        return str(await asyncio.to_thread(fetch, root, folder, version, fetched_folder()))

    async def __del__(self) -> None:
        await asyncio.shield(self._ends.aclose())
