"""One request on a connection that keeps what is written to it: uvicorn and the gateway without a socket."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from sidestream.runtime.gateway.app import build_app
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.interfaces import Admission, Observer
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from sidestream.runtime.gateway.server_process import server_config
from sidestream.runtime.gateway.settings import GatewaySettings
from uvicorn.server import ServerState

from support.gateway import FakeEngines


class Written(asyncio.Transport):
    """Keeps `writes`. `when_written` is called after each, with the connection's protocol, and sets `lost` when it took
    the connection down.
    """

    def __init__(self, when_written: Callable[[Any, "Written"], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.writes: list[bytes] = []
        self.protocol: Any = None
        self.lost = False
        self._when_written = when_written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))
        self._when_written(self.protocol, self)

    @property
    def body(self) -> str:
        """The body of the one answer, out of its chunks."""
        _, _, rest = b"".join(self.writes).partition(b"\r\n\r\n")
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body, end, rest = body + rest[:length], rest[length : length + 2], rest[length + 2 :]
            assert end == b"\r\n"
            if not length:
                assert not rest, "nothing comes after the end"
        return body.decode()

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Closable(Written):
    """A transport of a client that can be closed, and stops reading."""

    closed = paused = False

    def __init__(self, host: str) -> None:
        super().__init__(lambda protocol, transport: None)
        self._extra["peername"] = (host, 1)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def connector(engines: FakeEngines, **settings: Any) -> Callable[..., tuple[Any, Closable]]:
    """Return a function: the protocol and the transport of a new connection of a client to one gateway."""
    made = GatewaySettings(**settings)
    config = server_config(build_app(engines, NoAuth(), CompositeObserver(Metrics()), made), made, 1.0)
    config.load()

    def connect(host: str = "127.0.0.1") -> tuple[Any, Closable]:
        transport = Closable(host)
        transport.protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
        transport.protocol.connection_made(transport)
        return transport.protocol, transport

    return connect


async def asked(
    path: str,
    body: dict[str, Any],
    engines: FakeEngines | None = None,
    admission: Admission | None = None,
    observer: Observer | None = None,
    when_written: Callable[[Any, Written], None] = lambda protocol, transport: None,
) -> tuple[Written, int]:
    """The connection after an answer, and how many tasks the request took."""
    settings, tasks = GatewaySettings(), []
    loop = asyncio.get_running_loop()
    app = build_app(engines or FakeEngines(), admission or NoAuth(), observer or CompositeObserver(Metrics()), settings)
    config = server_config(app, settings, 1.0)
    config.load()
    protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
    transport, data = Written(when_written), json.dumps(body).encode()
    transport.protocol = protocol

    def counted(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
        tasks.append(asyncio.Task(work, loop=loop, **more))
        return tasks[-1]

    protocol.connection_made(transport)
    loop.set_task_factory(counted)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    protocol.data_received(head.encode() + data)
    await asyncio.wait(tasks)
    count = len(tasks)
    loop.set_task_factory(None)
    if not transport.lost:
        protocol.connection_lost(None)
    return transport, count
