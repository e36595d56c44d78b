"""Runs the gateway in uvicorn on a listening socket.

A supervisor starts it with `python -m sidestream.runtime.gateway.server_process FD SOCKET`. It receives its settings on
the channel FD and exits when the channel closes. `serve` runs it in the caller's process.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from msgspec.structs import replace
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..processes.channel import Channel, ChannelClosed
from ..processes.garbage_collection import PeriodicCollection, exclude_loaded_objects
from ..processes.logs import configure_logging
from ..processes.watchdog import HEARTBEAT_SECONDS
from .addresses import is_loopback_name
from .app import build_app, make_components
from .connections import ConnectionPool, limited_protocol
from .interfaces import Engines
from .settings import KEEP_ALIVE_SECONDS, MAX_HEADER_BYTES, GatewaySettings

BACKLOG = 2048
RESERVED_DESCRIPTORS = 256
"""File descriptors for all but connections."""
ORPHAN_DRAIN_SECONDS = 2.0
"""Time for open responses after the supervisor exited: it drains the engine before it exits."""
CLOSE_SECONDS = 1.0
"""Time to write the ends of responses after the engines' connections are closed."""
logger = logging.getLogger("sidestream.gateway")


def check_exposure(settings: GatewaySettings) -> None:
    """Raise ValueError for an address beyond this machine without keys."""
    has_key = settings.api_key or settings.keys is not None or settings.insecure
    if not is_loopback_name(settings.host) and not has_key:
        raise ValueError(
            f"--host {settings.host} can be reached from other machines, and no key is required; give --api-keys FILE "
            "(from `sidestream keys http add`), --api-key, or --insecure if the network is trusted"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ValueError for an address that is in use or invalid."""
    try:
        ((family, kind, proto, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        not_local = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = (
            "name an address of this machine with --host"
            if not_local
            else "stop the process that listens there, or choose another port with --port"
        )
        raise ValueError(f"cannot listen at {host} port {port}: {error.strerror}; {remedy}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    settings: GatewaySettings,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    channel: Channel | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, or until `channel` closes. Returns the exit code.

    on_ready   called with the URL when the server accepts requests

    Raises ValueError for settings that cannot be used.
    """
    components = make_components(settings)
    settings = replace(settings, max_connections=fitting_connections(settings.max_connections))
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it has stopped
        signal.signal(number, lambda *_: None)
    try:
        app = build_app(components.engines, components.admission, components.observer, settings)
        drain = settings.drain_seconds if channel is None else min(settings.drain_seconds, ORPHAN_DRAIN_SECONDS)
        config = server_config(app, settings, CLOSE_SECONDS)
        server = DrainingServer(config, components.engines, drain)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve(server, listener, on_ready, channel))
    finally:
        components.close()
    return 0


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains at the first signal: it refuses new requests and lets open ones finish.

    After `drain_seconds` it closes the connections to the engines, so that open responses end with an error.
    """

    def __init__(self, config: uvicorn.Config, engines: Engines, drain_seconds: float) -> None:
        super().__init__(config)
        self.engines, self._drain_seconds = engines, drain_seconds
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain is None and self.started:
            self._loop.call_soon_threadsafe(self.drain)
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def drain(self) -> None:
        """Begin to drain. A second call has no effect."""
        if self._drain is None:
            self.engines.expect_shutdown()
            self._drain = asyncio.create_task(self._exit_when_drained())

    async def _exit_when_drained(self) -> None:
        tasks = self.server_state.tasks
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                while tasks:
                    await asyncio.wait([*tasks])
        if tasks:
            await self.engines.close()
        self.should_exit = True


def server_config(app: ASGIApp, settings: GatewaySettings, drain_seconds: float) -> uvicorn.Config:
    """Return uvicorn's configuration. `drain_seconds`: time that open responses get at shutdown."""
    return uvicorn.Config(
        app,
        http=limited_protocol(AutoHTTPProtocol, ConnectionPool.of_settings(settings)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_SECONDS),
        timeout_graceful_shutdown=int(drain_seconds),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=BACKLOG,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
    )


async def _serve(
    server: DrainingServer, listener: socket.socket, on_ready: Callable[[str], None], channel: Channel | None
) -> None:
    url = url_of(listener)

    async def beat() -> None:
        ready, collection = False, PeriodicCollection()
        while True:
            if server.started and not ready:
                ready = True
                exclude_loaded_objects()
                on_ready(url)
            collection.collect_if_due()
            if channel is not None:
                channel.send_heartbeat()
            await asyncio.sleep(HEARTBEAT_SECONDS if ready else 0.02)

    def read() -> None:
        try:
            if channel.receive():  # type: ignore[union-attr]
                server.engines.expect_shutdown()  # the only message of a supervisor
        except ChannelClosed:
            asyncio.get_running_loop().remove_reader(channel.fileno())  # type: ignore[union-attr]
            server.drain()

    if channel is not None:
        asyncio.get_running_loop().add_reader(channel.fileno(), read)
    heartbeat = asyncio.create_task(beat())
    try:
        await server.serve(sockets=[listener])
    finally:
        heartbeat.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await heartbeat


def fitting_connections(wanted: int) -> int:
    """Return `wanted`, or how many connections the hard limit on open files allows. Raises the soft limit to that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + RESERVED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < files:
        fitting = max(hard - RESERVED_DESCRIPTORS, hard // 2)
        logger.warning("only %d of %d connections fit into the limit of %d open files", fitting, wanted, hard)
        wanted, files = fitting, hard
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return wanted


def run(fd: int, listener_fd: int) -> int:
    """Run as a supervisor's child process. Returns the exit code."""
    configure_logging("gateway", "warning")
    channel = Channel.from_fd(fd)
    listener = socket.socket(fileno=listener_fd)
    try:
        first: dict[str, Any]
        (first, *_) = channel.receive(block=True)
        settings = msgspec.convert(first["settings"], GatewaySettings)
        return serve(settings, listener, lambda url: channel.send({"event": "ready", "address": url}), channel)
    except ValueError as error:
        channel.send({"event": "failed", "message": " ".join(str(error).split())})
        return 2
    except ChannelClosed:
        return 1  # the supervisor exits and has reported the reason


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), int(sys.argv[2])))
