"""Limits on connections around uvicorn's protocol: their number, and the time that each may be silent.

uvicorn has no such limits: a client that sends half a header, or never reads its answer, would stay connected forever.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from .settings import MAX_HEADER_BYTES, GatewaySettings
from .write_batching import BatchingTransport, FlushQueue

HEADER_SECONDS = 20.0
"""Time for a complete request header, and for the rest of a body that no handler reads."""
WRITE_SECONDS = 60.0
"""Time that a client may not read while an answer waits for it."""
LINGER_SECONDS = 10.0
"""Time that a client gets to read an answer and to stop sending the rest of its body, which is discarded."""
DISCARD_SECONDS = 0.05
"""Pause between reads of such a rest: discarding it must not delay other connections."""
LOOPBACK = ("127.", "::1", "::ffff:127.")


@dataclass
class ConnectionCount:
    """Open connections, in total and by address.

    most        limit on all
    most_of_one limit on each address; None: see `GatewaySettings.connections_per_client`
    """

    most: int
    most_of_one: int | None
    by_host: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_settings(cls, settings: GatewaySettings) -> "ConnectionCount":
        """Return the count with the limits of `settings`."""
        return cls(settings.max_connections, settings.connections_per_client)

    def refusal(self, host: str) -> bytes | None:
        """Return the HTTP response that refuses another connection of this address; None: there is room."""
        share = self.most_of_one
        if share is None:
            share = self.most if host.startswith(LOOPBACK) else max(1, self.most // 2)
        if self.by_host.total() >= self.most:
            return _refusal("503 Service Unavailable", "the gateway has reached its limit of connections")
        if self.by_host[host] >= share:
            return _refusal("429 Too Many Requests", "this address has too many connections open; close one")
        return None


def _refusal(status: str, message: str) -> bytes:
    body = f'{{"error":{{"message":"{message}","type":"rate_limit_error","param":null,"code":"too_many_connections"}}}}'
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: 1\r\nConnection: close\r\n\r\n{body}"
    ).encode()


def limited_protocol(base: type[Any], count: ConnectionCount) -> type[Any]:
    """Return a subclass of uvicorn's protocol class `base` with these limits and with batched writes."""
    flush_queue = FlushQueue()

    class LimitedProtocol(base):
        """One connection."""

        app: ASGIApp

        def connection_made(self, transport: asyncio.Transport) -> None:
            peer = transport.get_extra_info("peername")
            self._host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
            self._header_timer: asyncio.TimerHandle | None = None
            self._write_timer: asyncio.TimerHandle | None = None
            self._linger_timer: asyncio.TimerHandle | None = None
            self._header_bytes = 0
            self._own_transport = transport
            refusal = count.refusal(self._host)
            self._refused = refusal is not None
            if refusal is not None:
                transport.write(refusal)
                transport.close()
                return
            count.by_host[self._host] += 1
            self._batching = BatchingTransport(transport, flush_queue, self._linger)
            self.app = self._batching.wrap(self.app)
            super().connection_made(self._batching)
            self._start_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._refused:
                return
            self._batching.writable = False
            count.by_host[self._host] -= 1
            if not count.by_host[self._host]:
                del count.by_host[self._host]
            for timer in (self._header_timer, self._write_timer, self._linger_timer):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            if self._batching.lingering:
                self._own_transport.pause_reading()
                asyncio.get_running_loop().call_later(DISCARD_SECONDS, self._discard_more)
                return
            super().data_received(data)
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                self._header_bytes = 0
                if self._header_timer is not None:
                    self._header_timer.cancel()
                    self._header_timer = None
                return
            self._start_header_timer()
            self._header_bytes += len(data)
            if cycle is None and self._header_bytes > 2 * MAX_HEADER_BYTES:
                self._own_transport.abort()

        def _linger(self) -> bool:
            """Send the end of the answer, and discard the rest of the request's body. Returns False without a rest.

            Closing a connection with unread data resets it, and the client may lose the answer.
            """
            cycle, transport = self.cycle, self._own_transport
            if cycle is None or not cycle.response_complete or not cycle.more_body or transport.is_closing():
                return False
            if self.timeout_keep_alive_task is not None:  # the body was discarded while the connection stayed open
                return False
            transport.write_eof()
            self._linger_timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.abort)
            self._discard_more()
            return True

        def _discard_more(self) -> None:
            if not self._own_transport.is_closing():
                self._own_transport.resume_reading()

        def eof_received(self) -> None:
            if not self._refused and not self._batching.lingering:
                super().eof_received()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._batching.writable = False
            if self._write_timer is None:
                loop = asyncio.get_running_loop()
                self._write_timer = loop.call_later(WRITE_SECONDS, self._own_transport.abort)

        def resume_writing(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None
            super().resume_writing()
            self._batching.writable = not self._batching.is_closing()

        def _start_header_timer(self) -> None:
            if self._header_timer is None:
                loop = asyncio.get_running_loop()
                self._header_timer = loop.call_later(HEADER_SECONDS, self._on_header_timeout)

        def _on_header_timeout(self) -> None:
            self._header_timer = None
            cycle = self.cycle
            if cycle is None or cycle.response_complete:
                self._own_transport.abort()

    return LimitedProtocol
