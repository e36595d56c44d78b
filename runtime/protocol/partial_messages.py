"""Limit the bytes of unfinished messages that libzmq keeps for each TCP connection.

libzmq stores all parts of a message until the last one arrives, without a limit, and does not report their size. But it
reports the descriptor of each accepted connection and of each message, and the kernel counts the bytes that a
connection has received. Bytes outside delivered messages are parts of an unfinished message, or do not belong to a
message (greeting, PING). The parts of two messages of one connection never mix, so a delivered message accounts for all
bytes before its end.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

CHECK_SECONDS = 0.25
BUSY_CHECK_SECONDS = 5.0
"""Interval while whole messages are always queued. Each connection is read many times in this interval."""
MAX_CONNECTION_BYTES = 64 << 20
"""Limit of one connection, including some MiB in the kernel's buffers. The longest message has 4 MiB."""
MAX_TOTAL_BYTES = 256 << 20
CURVE_BYTES = 33
"""Bytes that encryption adds to a frame's body (RFC 26)."""
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in `struct tcp_info` (linux/tcp.h, since 4.1)
_DISCONNECTED = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED


class PartialMessageLimit:
    """Closes connections of a bound socket that exceed the limits. `overhead`: bytes that the socket's mechanism adds
    to each frame's body.
    """

    def __init__(
        self, router: "zmq.Socket[Any]", overhead: int = CURVE_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._router = router
        name = f"inproc://connections-{id(self)}"
        router.monitor(name, zmq.EVENT_ACCEPTED | _DISCONNECTED)
        self._monitor: zmq.Socket[Any] = router.context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0  # else libzmq's thread waits for it
        self._monitor.connect(name)
        self._overhead = overhead
        self._clock = clock
        self._due = 0.0
        # by descriptor
        self._received: dict[int, int] = {}  # bytes received at the last check
        self._accounted: dict[int, int] = {}  # of those, bytes in delivered messages or outside messages
        self._delivered: dict[int, int] = {}  # bytes of messages delivered since the last check

    def count_message(self, frames: Sequence["zmq.Frame"]) -> None:
        descriptor, size = int(frames[0].get(zmq.SRCFD)), 0
        for frame in frames:
            body = len(frame) + self._overhead
            size += body + (2 if body < 256 else 9)
        self._delivered[descriptor] = self._delivered.get(descriptor, 0) + size

    def check(self, queued: bool = False) -> list[int]:
        """Close connections that exceed a limit and return their descriptors. `queued`: messages may be queued."""
        now = self._clock()
        if now < self._due + (BUSY_CHECK_SECONDS if queued else 0.0):
            return []
        self._due = now + CHECK_SECONDS
        self._update_connections()
        partial = dict[int, int]()
        for descriptor, before in self._received.items():
            received = _bytes_received(descriptor)
            if received is None:
                continue
            accounted = self._accounted[descriptor] + self._delivered.get(descriptor, 0)
            if descriptor in self._delivered:  # more of its messages may be queued
                accounted = max(accounted, before)
            else:
                partial[descriptor] = received - accounted
            self._received[descriptor], self._accounted[descriptor] = received, accounted
        self._delivered.clear()
        return self._enforce(partial)

    def _enforce(self, partial: dict[int, int]) -> list[int]:
        closed = [descriptor for descriptor, count in partial.items() if count > MAX_CONNECTION_BYTES]
        kept = {descriptor: count for descriptor, count in partial.items() if count <= MAX_CONNECTION_BYTES}
        while sum(kept.values()) > MAX_TOTAL_BYTES:
            closed.append(max(kept, key=kept.__getitem__))
            del kept[closed[-1]]
        for descriptor in closed:
            _shut_down(descriptor)
        return closed

    def _update_connections(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            descriptor = int(event["value"])
            self._received.pop(descriptor, None)
            self._accounted.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._received[descriptor] = self._accounted[descriptor] = 0

    def close(self) -> None:
        """Stop. Call it before the socket is closed."""
        self._router.disable_monitor()  # before the socket is closed: otherwise libzmq's thread would wait for a reader
        self._monitor.close(0)


def _duplicate(descriptor: int) -> socket.socket | None:
    """Return a duplicate of libzmq's socket; None if it is closed."""
    try:
        return socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None


def _bytes_received(descriptor: int) -> int | None:
    """Return the bytes that a TCP connection has received; None for other sockets."""
    end = _duplicate(descriptor)
    if end is None:
        return None
    with end:
        try:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return int(struct.unpack_from("Q", info, _BYTES_RECEIVED)[0])
        except (OSError, struct.error):
            return None


def _shut_down(descriptor: int) -> None:
    end = _duplicate(descriptor)
    if end is not None:
        with end:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                return
