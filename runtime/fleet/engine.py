"""A replica of the deployment `engine`: runs one engine on its GPU and reports its address.

The engine is `sidestream serve` without HTTP as a child process.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ray
from msgspec import structs
from ray import serve

from ...ops.core.kv_layout import PAGE_SIZE
from ..api.errors import ServerError
from ..client.async_client import AsyncClient
from ..processes.channel import ChannelClosed
from ..processes.child import Child, status_text
from ..protocol.addresses import default_address, parse
from ..server.settings import ServeSettings

_log = logging.getLogger("ray.serve")
STOP_SECONDS = 10.0
"""Time between the end of the drain and the kill of the engine."""
ANSWER_SECONDS = 5.0
OLD_SECONDS = 60.0
"""An engine locks its lock file right after it created it. An older file without a lock is stale."""
_SERVING = "serving at "
_COMMAND = ("-m", "sidestream.runtime.server.replica_process")


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

    async def __del__(self) -> None:
        await asyncio.shield(self._cleanup.aclose())


class EngineProcess:
    """A supervisor with its batcher and GPU process. They end with this process. Belongs to the running event loop.

    on_line   called with the lines that `sidestream serve` would print
    """

    def __init__(self, settings: ServeSettings, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._loop = asyncio.get_running_loop()
        self._address: asyncio.Future[str] = self._loop.create_future()
        self._last_error = ""
        self.ended = asyncio.Event()
        self._child = Child.start("engine", [sys.executable, *_COMMAND], settings, 0.0)
        self._loop.add_reader(self._child.channel.fileno(), self._receive)

    async def address(self) -> str:
        """Return the address when the engine is ready. Raises RuntimeError if it ended instead."""
        return await asyncio.shield(self._address)

    async def drain(self, seconds: float) -> None:
        """Send SIGTERM, which lets open requests finish as the settings allow, and kill the engine after `seconds`."""
        if not self.ended.is_set():
            self._child.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(seconds):
                    await self.ended.wait()
            except TimeoutError:
                self._child.process.kill()
        await asyncio.to_thread(self._child.stop)

    def _receive(self) -> None:
        try:
            messages = self._child.channel.receive()
        except ChannelClosed:
            self._loop.remove_reader(self._child.channel.fileno())
            self._loop.create_task(self._end())
            return
        for message in messages:
            line = str(message["line"])
            self._on_line(line)
            if line.startswith("error: "):
                self._last_error = line.removeprefix("error: ")
            if line.startswith(_SERVING) and not self._address.done():
                self._address.set_result(line.removeprefix(_SERVING))

    async def _end(self) -> None:
        status = await asyncio.to_thread(self._child.stop)
        self.ended.set()
        if not self._address.done():
            self._address.set_exception(RuntimeError(self._last_error or f"the engine ended ({status_text(status)})"))
            self._address.exception()  # mark as retrieved: there may be no waiter


def private_address(name: str, keys: bool) -> str:
    """Return a replica's listen address: TCP in the cluster if there are keys, else a socket file.

    Raises ValueError for several hosts without keys, since a socket file works on one host only.
    """
    if keys:
        host = ray.util.get_node_ip_address()
        return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
    hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    if len(hosts) > 1:
        raise ValueError(
            f"the cluster has {len(hosts)} hosts, and engines on other hosts need keys: create them with "
            "`sidestream keys curve DIR --client gateway`, copy DIR to every host, and set engine-keys to it"
        )
    folder = parse(default_address()).path
    directory = folder.parent if folder is not None else Path(f"/tmp/sidestream-{os.getuid()}")
    return f"ipc://{directory}/fleet-{name}.sock"


def remove_files(address: str) -> None:
    """Remove the files of an engine that has ended."""
    path = parse(address).path
    if path is not None:
        _remove(path)


def remove_stale_files(address: str, old_seconds: float = OLD_SECONDS) -> None:
    """Remove the files of killed engines in the directory of `address`. Their lock files are unlocked."""
    path = parse(address).path
    if path is None:
        return
    for lock in path.parent.glob("fleet-*.sock.lock"):
        with contextlib.suppress(OSError):  # it is locked, or another process removes it
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime >= old_seconds:
                    _remove(lock.with_suffix(""))
            finally:
                os.close(descriptor)


def _remove(socket: Path) -> None:
    for path in (socket, socket.with_name(f"{socket.name}.lock")):
        path.unlink(missing_ok=True)
