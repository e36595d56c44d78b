"""Streams of events, as server-sent events: what arrived together leaves in one write."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..shapes.common import StreamOptions, Usage
from .bodies import while_connected

encode = msgspec.json.Encoder().encode
Write = tuple[bytes, bool]
"""Events that leave together, and whether they are a stream's last."""
DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Frame:
    """What every event of one stream has around its choices: encoded once."""

    def __init__(self, kind: str, answer_id: str, created: int, model: str, options: StreamOptions | None) -> None:
        fields = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + encode(fields)[:-1] + b',"choices":'
        self.wants_usage = options is not None and bool(options.include_usage)
        self._tail = b',"usage":null}\n\n' if self.wants_usage else b"}\n\n"

    def event(self, choice: object) -> bytes:
        """One event of one choice. JSON has no bare line break, so one line holds it."""
        return self._head + b"[" + encode(choice) + b"]" + self._tail

    def end(self, usage: Usage) -> bytes:
        """The last events: the usage, if it was asked for, and the end."""
        told = self._head + b'[],"usage":' + encode(usage) + b"}\n\n" if self.wants_usage else b""
        return told + DONE


def named_event(name: str, body: object) -> bytes:
    """One event with its name on a line of its own."""
    return b"event: " + name.encode() + b"\ndata: " + encode(body) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """The event that ends a stream in which something went wrong."""
    return b"data: " + body + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields, a write for each. What is raised before the first is answered with its own status.

    `close` is awaited in the end, also when the client goes away, even before the first event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[Write, None], headers: dict[str, str], close: Callable[[], Awaitable[None]]
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(_HEADERS | headers)
        self._events, self._close, self._begun = events, close, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        try:
            async with aclosing(self._events):
                await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            if not self._begun:
                raise
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        async for data, last in self._events:
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": not last})
            if last:  # nothing is awaited between the end of the answer and the end of the watch over the client
                return


def joined(parts: Sequence[bytes]) -> bytes:
    """Several events as one write."""
    return parts[0] if len(parts) == 1 else b"".join(parts)
