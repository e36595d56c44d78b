"""A replica of the deployment `engine`: runs one engine on its GPU and reports its address."""

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
from .engine_process import EngineProcess, private_address, remove_files, remove_stale_files

_log = logging.getLogger("ray.serve")
STOP_SECONDS = 10.0
"""Time between the end of the drain and the kill of the engine."""
ANSWER_SECONDS = 5.0


class Engine:
    """The actor of Ray Serve. It is ready when its programs are captured.

    Tokens do not pass through it: the ingresses connect to the engine with the protocol of `docs/protocol.md`.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it, and then treats the replica as ready
        self, settings: ServeSettings, client_keys: str | None
    ) -> None:
        self._cleanup = contextlib.AsyncExitStack()  # Ray calls __del__ even if this raises
        self._name = serve.get_replica_context().replica_id.unique_id
        self._settings = structs.replace(settings, bind=private_address(self._name, settings.keys is not None))
        remove_stale_files(self._settings.bind)
        self._cleanup.callback(remove_files, self._settings.bind)
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
        self._cleanup.push_async_callback(self._client.close)
        self._cleanup.push_async_callback(self._process.drain, settings.drain_seconds + STOP_SECONDS)

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the metadata that `request_router` receives."""
        return {"address": self._address}

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has ended. Ray then starts another replica."""
        if self._process.ended.is_set():
            raise RuntimeError("the engine's process has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for `autoscaling`: open requests, and tokens in the KV cache of running ones.

        If the engine does not answer, because it is busy or restarts, the last load is returned.
        """
        with contextlib.suppress(ServerError, TimeoutError):
            stats = await self._client.stats()
            self._load = {
                "requests": float(stats.get("requests_open", 0)),
                "tokens": float(stats.get("pages_in_use", 0) * PAGE_SIZE),
            }
        return self._load

    async def wake(self) -> None:
        """Do nothing. The call makes Ray start a first replica."""

    async def fetch(self, replica: str, root: str, folder: str, version: str) -> str:
        """Copy an adapter of a remote root to this host. Returns its directory.

        replica   this replica's name, for `EngineRouter`

        Raises ValueError and the errors of the file system.
        """
        return str(await asyncio.to_thread(fetch, root, folder, version, fetched_folder()))

    async def __del__(self) -> None:
        await asyncio.shield(self._cleanup.aclose())
