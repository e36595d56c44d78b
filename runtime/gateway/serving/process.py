"""The gateway's process: uvicorn on a socket that listens.

`python -m sidestream.runtime.gateway.serving.process FD SOCKET` is how a supervisor starts it: its settings come over
the line FD, and it ends when that line does. `serve` runs it in the caller's process.
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
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ...processes.channel import Channel, ChannelClosed
from ...processes.watch import HEARTBEAT_SECONDS
from ..settings import KEEP_ALIVE_SECONDS, MAX_HEADER_BYTES, GatewaySettings
from .app import build_app
from .bounds import ConnectionCount, bounded
from .parts import make_parts

BACKLOG = 2048
LOOPBACK_HOSTS = ("localhost", "127.", "::1")
HANG_UP_SECONDS = 3
"""How long open answers may go on when the supervisor has gone: it has drained the engine before."""


def check_exposure(settings: GatewaySettings) -> None:
    """Raises ValueError for an address beyond this machine without keys."""
    guarded = settings.api_key or settings.keys is not None or settings.insecure
    if not settings.host.startswith(LOOPBACK_HOSTS) and not guarded:
        raise ValueError(
            f"--host {settings.host} can be reached from other machines, and everyone there could ask for anything; "
            "give keys (`sidestream keys http add`, then the file), --api-key, or --insecure if the network is trusted"
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ValueError for an address that is taken or is none."""
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
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = (
            "name an address of this machine with --host"
            if elsewhere
            else "stop what listens there, or choose another with --port"
        )
        raise ValueError(f"cannot listen at {host} port {port}: {error.strerror}; {remedy}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where it can be reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    settings: GatewaySettings,
    listener: socket.socket,
    say: Callable[[str], None],
    channel: Channel | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, or until `channel` ends; returns the exit code.

    Raises ValueError for settings that cannot be served with.
    """
    parts = make_parts(settings)
    _allow_descriptors(settings.max_connections)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it has stopped
        signal.signal(number, lambda *_: None)
    try:
        app = build_app(parts.engines, parts.admission, parts.observer, settings)
        drain = settings.drain_seconds if channel is None else min(settings.drain_seconds, HANG_UP_SECONDS)
        config = server_config(app, settings, drain)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve(uvicorn.Server(config), listener, say, channel, parts.engines.expect_end))
    finally:
        parts.close()
    return 0


def server_config(app: ASGIApp, settings: GatewaySettings, drain_seconds: float) -> uvicorn.Config:
    """uvicorn with the gateway's bounds; `drain_seconds`: how long open answers may go on when it stops."""
    return uvicorn.Config(
        app,
        http=bounded(AutoHTTPProtocol, ConnectionCount.of_settings(settings)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_SECONDS),
        timeout_graceful_shutdown=int(drain_seconds),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=BACKLOG,
    )


async def _serve(
    server: uvicorn.Server,
    listener: socket.socket,
    say: Callable[[str], None],
    channel: Channel | None,
    engines_end: Callable[[], None],
) -> None:
    url = url_of(listener)

    async def beat() -> None:
        told = False
        while True:
            if server.started and not told:
                told = True
                say(url)
            if channel is not None:
                channel.beat()
            await asyncio.sleep(HEARTBEAT_SECONDS if told else 0.02)

    def read() -> None:
        try:
            if channel.receive():  # type: ignore[union-attr]
                engines_end()  # all that a supervisor says is that it stops them
        except ChannelClosed:
            asyncio.get_running_loop().remove_reader(channel.fileno())  # type: ignore[union-attr]
            server.should_exit = True

    if channel is not None:
        asyncio.get_running_loop().add_reader(channel.fileno(), read)
    beating = asyncio.create_task(beat())
    try:
        await server.serve(sockets=[listener])
    finally:
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating


def _allow_descriptors(connections: int) -> None:
    """Each connection takes one; many systems allow a process 1024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256 if hard == resource.RLIM_INFINITY else min(hard, connections + 256)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(fd: int, listener_fd: int) -> int:
    """The process under a supervisor. Returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s gateway %(message)s")
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
        return 1  # the supervisor ends, and has said why


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), int(sys.argv[2])))
