"""What a connection may take, around uvicorn's own protocol: how many there are, and how long each may be silent.

uvicorn bounds neither: a client that sends half a header, or never reads its answer, would stay forever.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from ..settings import MAX_HEADER_BYTES, GatewaySettings
from .joined_writes import JoinedWrites
from .turn import Turn

HEADER_SECONDS = 20.0
"""A request's header has to be complete after so long; the rest of a body that nobody reads as well."""
WRITE_SECONDS = 60.0
"""So long may a client not read while an answer waits for it."""
LOOPBACK = ("127.", "::1", "::ffff:127.")


@dataclass
class ConnectionCount:
    """Open connections, of all clients and of each address."""

    most: int
    most_of_one: int | None
    of: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_settings(cls, settings: GatewaySettings) -> "ConnectionCount":
        """See `GatewaySettings.connections_per_client`."""
        return cls(settings.max_connections, settings.connections_per_client)

    def refusal(self, host: str) -> bytes | None:
        """The answer to one more connection of this address, if it is one too many."""
        share = self.most_of_one
        if share is None:
            share = self.most if host.startswith(LOOPBACK) else max(1, self.most // 2)
        if self.of.total() >= self.most:
            return _refusal("503 Service Unavailable", "the gateway has as many connections as it takes")
        if self.of[host] >= share:
            return _refusal("429 Too Many Requests", "this address has too many connections open; close one")
        return None


def _refusal(status: str, message: str) -> bytes:
    body = f'{{"error":{{"message":"{message}","type":"rate_limit_error","param":null,"code":"too_many_connections"}}}}'
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: 1\r\nConnection: close\r\n\r\n{body}"
    ).encode()


def bounded(base: type[Any], count: ConnectionCount) -> type[Any]:
    """uvicorn's protocol class, with these bounds."""
    turn = Turn()

    class Bounded(base):
        """One connection."""

        app: ASGIApp

        def connection_made(self, transport: asyncio.Transport) -> None:
            peer = transport.get_extra_info("peername")
            self._host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
            self._timer: asyncio.TimerHandle | None = None
            self._write_timer: asyncio.TimerHandle | None = None
            self._header_bytes = 0
            self._bounded_transport = transport
            refusal = count.refusal(self._host)
            self._refused = refusal is not None
            if refusal is not None:
                transport.write(refusal)
                transport.close()
                return
            count.of[self._host] += 1
            self._joined = JoinedWrites(transport, turn)
            self.app = self._joined.joining(self.app)
            super().connection_made(self._joined)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._refused:
                return
            self._joined.writable = False
            count.of[self._host] -= 1
            if not count.of[self._host]:
                del count.of[self._host]
            for timer in (self._timer, self._write_timer):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            super().data_received(data)
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                self._header_bytes = 0
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                return
            self._watch()
            self._header_bytes += len(data)
            if cycle is None and self._header_bytes > 2 * MAX_HEADER_BYTES:
                self._bounded_transport.abort()

        def eof_received(self) -> None:
            if not self._refused:
                super().eof_received()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._joined.writable = False
            if self._write_timer is None:
                loop = asyncio.get_running_loop()
                self._write_timer = loop.call_later(WRITE_SECONDS, self._bounded_transport.abort)

        def resume_writing(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None
            super().resume_writing()
            self._joined.writable = not self._joined.is_closing()

        def _watch(self) -> None:
            """No request is being answered: what comes has to become one in time."""
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(HEADER_SECONDS, self._late)

        def _late(self) -> None:
            self._timer = None
            cycle = self.cycle
            if cycle is None or cycle.response_complete:
                self._bounded_transport.abort()

    return Bounded
