"""A connection's writes, joined: an answer's head leaves with the first bytes of its body, and its last bytes with what
ends them. uvicorn writes each of these for itself, and a system call takes longer than all else that is done for one.
"""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..routes.event_stream import DIRECT_BODY
from .direct_body import DirectBody
from .turn import Turn


class JoinedWrites(asyncio.Transport):
    """Another transport, whose writes can be held. `writable`: it is open, and its buffer is not full."""

    def __init__(self, transport: asyncio.Transport, turn: Turn) -> None:
        super().__init__()
        self._transport, self._turn = transport, turn
        self._added: list[bytes] = []
        self._held: list[bytes] | None = None
        self.writable = True

    def joining(self, app: ASGIApp) -> ASGIApp:
        """`app`, for requests of this connection: what it sends at a time is written at a time. It finds the answer's
        `DirectBody` in its scope.
        """

        async def joined(scope: Scope, receive: Receive, send: Send) -> None:
            body = scope[DIRECT_BODY] = DirectBody(self)

            async def send_joined(message: Message) -> None:
                if self._held is None:
                    self._held = []
                begins = False
                try:
                    await send(message)
                    begins = message["type"] == "http.response.start"
                    if begins:
                        body.begin(b"".join(self._held))
                finally:
                    if not begins:
                        self._release()

            await app(scope, receive, send_joined)

        return joined

    def add(self, data: bytes) -> None:
        """Write at the end of this turn of the loop, with what else is added, or before anything else is written."""
        if not self._added:
            self._turn.add(self)
        self._added.append(data)

    def flush(self) -> None:
        """Write what was added."""
        added, self._added = self._added, []
        if added and not self._transport.is_closing():
            self._transport.write(added[0] if len(added) == 1 else b"".join(added))

    def _release(self) -> None:
        self.flush()
        held, self._held = self._held, None
        if held:
            self._transport.write(b"".join(held))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, or hold what is to be written."""
        if self._held is None:
            self.flush()
            self._transport.write(data)
        else:
            self._held.append(bytes(data))

    def close(self) -> None:
        """Write what is held, and close."""
        self._release()
        self.writable = False
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self.writable = False
        self._transport.abort()

    def is_closing(self) -> bool:
        """See asyncio."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See asyncio."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """See asyncio."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See asyncio."""
        self._transport.resume_reading()
