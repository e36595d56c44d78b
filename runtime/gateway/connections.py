"""Limits on connections around uvicorn's protocol: their number, and the time that each may be silent.

uvicorn has no such limits: a client that sends half a header, or never reads its answer, would stay connected forever.
"""

import asyncio
import ipaddress
import socket
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from .addresses import Network, in_networks, is_loopback
from .interfaces import GatewayError
from .settings import MAX_HEADER_BYTES, GatewaySettings
from .socket_writes import BatchingTransport, FlushQueue

HEADER_SECONDS = 20.0
"""Time for a complete request header, and for the rest of a body that no handler reads."""
WRITE_SECONDS = 60.0
"""Time that a client may not read while an answer waits for it."""
PROBE_SECONDS = 0.5
"""Interval of searches for half-closed connections whose client has closed both directions."""
MAX_REFUSED = 128
"""Connections above the limit that are read so that their requests can be refused; others are cut."""
REFUSAL = "sidestream.refusal"
"""Key of the scope: the GatewayError that refuses the requests of a connection above the limit."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LINGER_SECONDS = 10.0
"""Time that a client gets to read an answer and to stop sending the rest of its body, which is discarded."""
DISCARD_SECONDS = 0.05
"""Pause between reads of such a rest: discarding it must not delay other connections."""
_DISCARDED = bytearray(1 << 20)
"""Never written: with MSG_TRUNC, Linux discards up to so many bytes without a copy."""


class Connection(Protocol):
    """What `ConnectionPool` needs of a connection."""

    def evict(self) -> None:
        """Leave the pool and close."""


@dataclass(eq=False)
class ConnectionPool:
    """Open connections. If there is no room for another one, the oldest one without a request is evicted.

    most                limit on all
    most_of_one         limit on each address; None: see `GatewaySettings.connections_per_client`
    proxies             networks whose addresses have no limit of their own
    hosts               connection -> address
    headless, resting   connections without a complete request header so far, and between two requests; oldest first
    """

    most: int
    most_of_one: int | None = None
    proxies: tuple[Network, ...] = ()
    hosts: dict[Connection, str] = field(default_factory=dict)
    headless: dict[Connection, None] = field(default_factory=dict)
    resting: dict[Connection, None] = field(default_factory=dict)
    _by_host: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_settings(cls, settings: GatewaySettings) -> "ConnectionPool":
        """Return the pool with the limits of `settings`."""
        proxies = tuple(ipaddress.ip_network(network) for network in settings.trusted_proxies)
        return cls(settings.max_connections, settings.connections_per_client, proxies)

    def make_room(self, host: str) -> GatewayError | None:
        """Make room for a connection of this address. Returns the error that refuses it if all others are busy."""
        own, full = self._by_host[host] >= self._share(host), len(self.hosts) >= self.most
        if not (own or full) or self._evict(host if own else None):
            return None
        if full:
            return _refusal(503, "the gateway has reached its limit of connections; try again")
        return _refusal(429, "this address has too many connections open; close one")

    def add(self, connection: Connection, host: str) -> None:
        """Add a connection that has sent nothing yet."""
        self.hosts[connection] = host
        self._by_host[host] += 1
        self.headless[connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove a connection, if it is there."""
        self.set_busy(connection)
        host = self.hosts.pop(connection, None)
        if host is not None:
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    def set_busy(self, connection: Connection) -> None:
        """Exempt a connection from eviction: it has an open request."""
        self.headless.pop(connection, None)
        self.resting.pop(connection, None)

    def set_resting(self, connection: Connection) -> None:
        """Mark a connection as open without a request."""
        if connection in self.hosts:
            self.resting[connection] = None

    def _share(self, host: str) -> int:
        if in_networks(host, self.proxies):
            return self.most
        if self.most_of_one is not None:
            return self.most_of_one
        return self.most if is_loopback(host) else max(1, self.most // 2)

    def _evict(self, host: str | None) -> bool:
        """Evict the oldest connection of an address (None: of any) without a request. Returns whether there was one."""
        for connection in chain(self.headless, self.resting):
            if host is None or self.hosts[connection] == host:
                connection.evict()
                return True
        return False


def _refusal(status: int, message: str) -> GatewayError:
    return GatewayError(
        status,
        message,
        "rate_limit_error",
        "too_many_connections",
        retry_after=1.0,
        headers={"Connection": "close"},
    )


def _refusing(app: ASGIApp, refusal: GatewayError) -> ASGIApp:
    async def refused(scope: Scope, receive: Receive, send: Send) -> None:
        scope[REFUSAL] = refusal
        await app(scope, receive, send)

    return refused


def _discard(descriptor: int) -> bool:
    """Discard what a connection has received. Returns False if its client has closed or reset it."""
    peer = socket.socket(fileno=descriptor)
    try:
        return peer.recv_into(_DISCARDED, 0, socket.MSG_TRUNC | socket.MSG_DONTWAIT) > 0
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        peer.detach()  # the transport closes it


def limited_protocol(base: type[Any], connections: ConnectionPool) -> type[Any]:
    """Return a subclass of uvicorn's protocol class `base` with these limits and with batched writes."""
    flush_queue = FlushQueue()
    refused = ConnectionPool(MAX_REFUSED)

    class LimitedProtocol(base):
        """One connection."""

        app: ASGIApp

        def connection_made(self, transport: asyncio.Transport) -> None:
            peer = transport.get_extra_info("peername")
            host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
            self._header_timer: asyncio.TimerHandle | None = None
            self._write_timer: asyncio.TimerHandle | None = None
            self._probe_timer: asyncio.TimerHandle | None = None
            self._linger_timer: asyncio.TimerHandle | None = None
            self._header_bytes = 0
            self._half_closed = False
            self._own_transport = transport
            self._pool: ConnectionPool | None = connections
            refusal = connections.make_room(host)
            if refusal is not None:
                self._pool = None if refused.make_room(host) is not None else refused
                self.app = _refusing(self.app, refusal)
            if self._pool is None:
                transport.abort()
                return
            self._pool.add(self, host)
            self._batching = BatchingTransport(transport, flush_queue, self._linger)
            self.app = self._batching.wrap(self.app)
            super().connection_made(self._batching)
            self._start_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._pool is None:
                return
            self._pool.remove(self)
            for timer in (self._header_timer, self._write_timer, self._probe_timer, self._linger_timer):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)
            self._batching.forget_protocol()

        def evict(self) -> None:
            """Leave the pool and close."""
            if self._pool is not None:
                self._pool.remove(self)
            self._own_transport.abort()

        def data_received(self, data: bytes) -> None:
            if self._pool is None:
                return
            if self._batching.lingering:
                return
            previous = self.cycle
            in_body = previous is not None and previous.more_body and not previous.response_complete
            super().data_received(data)
            cycle = self.cycle
            if cycle is not previous or in_body or self.flow.read_paused:
                self._header_bytes = 0
            else:  # a part of a header, or the rest of a small body that no handler read
                self._header_bytes += len(data)
                if self._header_bytes > 2 * MAX_HEADER_BYTES:
                    self._own_transport.abort()
                    return
            if cycle is None or cycle.response_complete:
                self._start_header_timer()
                return
            self._pool.set_busy(self)
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._pool is not None and self.cycle.response_complete and not self._own_transport.is_closing():
                self._pool.set_resting(self)
                if self._half_closed:
                    self._batching.close()

        def eof_received(self) -> bool:
            """Return whether the connection stays open for writing: the client may wait for its answer."""
            cycle = self.cycle
            if self._pool is None or cycle is None or cycle.response_complete or cycle.more_body:
                return False
            if not self._half_closed:
                self._half_closed = True
                self._send_probe()
                self._search_reset()
            return True

        def _send_probe(self) -> None:
            """Send something that a client which closed both directions answers with a reset, and others ignore."""
            if self.cycle.scope["http_version"] != "1.1":  # it knows no interim responses; the kernel probes
                own_socket = self._own_transport.get_extra_info("socket")
                own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                own_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
                own_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            elif not self.cycle.response_started and not getattr(self, "pipeline", None):
                self._own_transport.write(_CONTINUE)

        def _search_reset(self) -> None:
            """Close if the client has reset the connection. Only its socket has that error: it is no longer read."""
            self._probe_timer = None
            if self._own_transport.is_closing():
                return
            if self._own_transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._own_transport.abort()
            else:
                loop = asyncio.get_running_loop()
                self._probe_timer = loop.call_later(PROBE_SECONDS, self._search_reset)

        def _linger(self) -> bool:
            """Send the end of the answer, and discard the rest of the request's body. Returns False without a rest.

            Closing a connection with unread data resets it, and the client may lose the answer.
            """
            cycle, transport = self.cycle, self._own_transport
            if cycle is None or not cycle.response_complete or not cycle.more_body or transport.is_closing():
                return False
            if self.timeout_keep_alive_task is not None:  # the body was discarded while the connection stayed open
                return False
            try:
                transport.write_eof()
            except OSError:  # the client has reset the connection
                return False
            loop = asyncio.get_running_loop()
            self._linger_timer = loop.call_later(LINGER_SECONDS, transport.abort)
            transport.pause_reading()
            loop.call_soon(self._discard_more)
            return True

        def _discard_more(self) -> None:
            if self._own_transport.is_closing():
                return
            if _discard(self._own_transport.get_extra_info("socket").fileno()):
                asyncio.get_running_loop().call_later(DISCARD_SECONDS, self._discard_more)
            else:
                self._own_transport.close()

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
