"""An answer as a stream of events: what arrived together leaves in one write.

A task for each stream waits for what begins and ends an answer, and for what goes wrong. Between them chunks take a
short way: what the engine's connection reads is told as it is read, and written in the same turn of the loop, as long
as the client reads as fast. A task that is woken for each of them costs more than all that it does.
"""

from collections.abc import Sequence
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...protocol.messages import Chunk
from ..contracts import GatewayError
from .answering import Answering, Counts
from .bodies import while_connected

DIRECT_BODY = "sidestream.direct_body"
"""The connection's `DirectBody` in a request's scope, where there is a connection."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class DirectBody(Protocol):
    """Writes parts of an answer's body without a task; its beginning and its end are sent as ever."""

    @property
    def ready(self) -> bool:
        """Whether the answer has begun, and its client is there and reads."""
        ...

    def write(self, part: bytes) -> None:
        """Write a part, if `ready`."""


class Teller(Protocol):
    """Words one answer's chunks as events."""

    def tell(self, place: int, chunks: Sequence[Chunk]) -> list[bytes]:
        """Chunks of the answer to prompt number `place`; none if there is nothing to tell yet."""
        ...

    def end(self, counts: Counts) -> list[bytes]:
        """All chunks were told."""
        ...

    def failed(self, problem: GatewayError) -> bytes:
        """Something went wrong after the first event."""
        ...


class EventStream(Response):
    """Sends what `teller` tells of an answer. What is raised before the first event is answered with its own status.

    The answering is closed in the end, also when the client goes away, even before the first event.
    """

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, teller: Teller) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(_HEADERS | answering.headers)
        self._answering, self._teller = answering, teller
        self._body: DirectBody | None = None
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        self._body = scope.get(DIRECT_BODY)
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnect:
            if not self._begun:
                raise
        finally:
            await self._answering.close()

    async def _send_all(self, send: Send) -> None:
        answering, teller = self._answering, self._teller
        try:
            async for place, chunks in answering.pieces(None if self._body is None else self._write_at_once):
                events = teller.tell(place, chunks)
                last = answering.complete
                if last:
                    events += teller.end(answering.counts)
                if events:
                    await self._send(send, b"".join(events), last)
                if last:  # nothing is awaited between the end of the answer and the end of the watch over the client
                    return
        except GatewayError as problem:
            if not self._begun:
                raise
            await self._send(send, teller.failed(problem), True)

    async def _send(self, send: Send, data: bytes, last: bool) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": not last})

    def _write_at_once(self, chunk: Chunk) -> bool:
        """Tell a chunk from the middle of the answer, unless the client has to be waited for."""
        body = self._body
        if body is None or not body.ready:
            return False
        events = self._teller.tell(0, (chunk,))
        if events:
            body.write(b"".join(events))
        return True
