"""Joins the writes of a connection, since each system call takes longer than all other work for a token.

The head of an answer is written with the first bytes of its body, and the last bytes with the end of the body. Chunks
from the middle of an answer are written at the end of an event loop iteration, after all received data is handled,
because a write wakes the client, which may then occupy the CPU core. Chunks of several steps become one write.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api.context import CLOSED
from .api.event_stream import DIRECT_BODY

_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


class FlushQueue:
    """Transports to flush at the end of an event loop iteration. Belongs to one loop."""

    def __init__(self) -> None:
        self._pending: list[BatchingTransport] = []

    def add(self, transport: "BatchingTransport") -> None:
        """Flush this transport after the callbacks that are ready now."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(transport)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for transport in pending:
            transport.flush()


class DirectBody:
    """Implements `event_stream.DirectBody`: writes HTTP chunks with plain calls, without uvicorn's coroutines.

    sent   bytes of the body that were written here
    """

    def __init__(self, transport: "BatchingTransport") -> None:
        self._transport = transport
        self._chunked = False
        self.sent = 0

    def begin(self, head: bytes) -> None:
        """Receive the head of the response as uvicorn wrote it. Only a chunked body is written here."""
        self._chunked = _CHUNKED in head.lower()

    @property
    def ready(self) -> bool:
        return self._chunked and self._transport.writable

    def write(self, part: bytes) -> None:
        """See `event_stream.DirectBody`. `part` must not be empty: an empty chunk ends a body."""
        self.sent += len(part)
        self._transport.add(b"%x\r\n%b\r\n" % (len(part), part))


class BatchingTransport(asyncio.Transport):
    """Wraps a transport and can hold back its writes.

    writable  it is open and its buffer is not full
    linger    called before it is closed; if it returns True, it closes the transport later
    """

    def __init__(
        self, transport: asyncio.Transport, flush_queue: FlushQueue, linger: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        self._transport, self._flush_queue, self._linger = transport, flush_queue, linger
        self.lingering = False
        self._added: list[bytes] = []
        self._held: list[bytes] | None = None
        self._reframe: Callable[[bytes], bytes] | None = None
        self.writable = True

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with batched writes. Its scope holds the `DirectBody` of the response."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["http_version"] == "1.0":
                send = self._without_chunks(send)
            body = scope[DIRECT_BODY] = DirectBody(self)
            scope[CLOSED] = self.is_closing

            async def batched_send(message: Message) -> None:
                if self._held is None:
                    self._held = []
                is_head = False
                try:
                    await send(message)
                    is_head = message["type"] == "http.response.start"
                    if is_head:
                        body.begin(b"".join(self._held))
                finally:
                    if not is_head:
                        self._release()

            try:
                await app(scope, receive, batched_send)
            except asyncio.CancelledError:  # by uvicorn: the response is still open at the end of a shutdown
                self.abort()

        return wrapped

    def _without_chunks(self, send: Send) -> Send:
        """Return `send` for HTTP/1.0, which has no chunks: the end of the connection ends a body of unknown length."""
        sized = False

        async def plain_send(message: Message) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not sized:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
                    self._reframe = lambda head: head.replace(_CHUNKED, b"\r\n", 1)
            elif not sized:
                body: bytes = message.get("body", b"")
                self._reframe = lambda chunk: body
            try:
                await send(message)
            finally:
                self._reframe = None

        return plain_send

    def add(self, data: bytes) -> None:
        """Write at the end of the event loop iteration, or before the next other write."""
        if not self._added:
            self._flush_queue.add(self)
        self._added.append(data)

    def flush(self) -> None:
        """Write the added data."""
        added, self._added = self._added, []
        if added and not self._transport.is_closing():
            self._transport.write(added[0] if len(added) == 1 else b"".join(added))

    def _release(self) -> None:
        self.flush()
        held, self._held = self._held, None
        if held:
            self._transport.write(b"".join(held))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, or hold the data back."""
        if self._reframe is not None:
            data, self._reframe = self._reframe(bytes(data)), None
        if self._held is None:
            self.flush()
            self._transport.write(data)
        else:
            self._held.append(bytes(data))

    def close(self) -> None:
        """Write held data, then close."""
        self._release()
        self.writable = False
        if self.lingering or not self._linger():  # a second call, such as that of a shutdown, closes it at once
            self._transport.close()
        else:
            self.lingering = True

    def forget_protocol(self) -> None:
        """Drop `linger` of a lost connection: it would keep protocol, transport and request in a reference cycle."""
        self.writable = False
        self._linger = lambda: False

    def abort(self) -> None:
        self.writable = False
        self._transport.abort()

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
