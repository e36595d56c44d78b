"""What TCP connections of a libzmq socket have sent that no whole message has brought.

libzmq keeps a message's parts until the last one has come, however many, and cannot be asked how much that is. But it
tells which descriptors it has accepted, and of each message the one that it came from; the kernel knows how many bytes
each has received. What is not in messages that came is held, or was no message (a greeting, a PING). Parts of two
messages of one connection never mix: after a message, only what came later can be held.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

LOOK_SECONDS = 0.25
BUSY_SECONDS = 5.0
"""Where whole messages always wait: connections take turns, and in so long each that has some has had many."""
MAX_HELD_BYTES = 64 << 20
"""Of one connection; the kernel may hold some MiB of it. The longest message has 4 MiB."""
MAX_ALL_BYTES = 256 << 20
CURVE_BYTES = 33
"""What encryption adds to a frame's body (RFC 26: a name, a count, flags, and the box's own)."""
_RECEIVED = 128  # where `struct tcp_info` has tcpi_bytes_received (linux/tcp.h, since 4.1)
_GONE = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED


class Inflow:
    """Watches the connections of a bound socket, and cuts off those that send a message without an end.

    overhead   what the socket's mechanism adds to a frame's body
    """

    def __init__(
        self, router: "zmq.Socket[Any]", overhead: int = CURVE_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._router = router
        name = f"inproc://inflow-{id(self)}"
        router.monitor(name, zmq.EVENT_ACCEPTED | _GONE)
        self._monitor: zmq.Socket[Any] = router.context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0  # libzmq's thread would wait for it
        self._monitor.connect(name)
        self._overhead = overhead
        self._clock = clock
        self._due = 0.0
        self._last: dict[int, int] = {}  # by descriptor: bytes received at the last look
        self._done: dict[int, int] = {}  # of those: in messages that came, or in none
        self._heard: dict[int, int] = {}  # bytes of messages that have come since then

    def came(self, frames: Sequence["zmq.Frame"]) -> None:
        """A whole message has come."""
        descriptor, size = int(frames[0].get(zmq.SRCFD)), 0
        for frame in frames:
            body = len(frame) + self._overhead
            size += body + (2 if body < 256 else 9)
        self._heard[descriptor] = self._heard.get(descriptor, 0) + size

    def look(self, waiting: bool = False) -> list[int]:
        """Cut off who holds too much, and return their descriptors. `waiting`: whole messages may wait."""
        now = self._clock()
        if now < self._due + (BUSY_SECONDS if waiting else 0.0):
            return []
        self._due = now + LOOK_SECONDS
        self._follow()
        held = dict[int, int]()
        for descriptor, last in self._last.items():
            received = _received(descriptor)
            if received is None:
                continue
            done = self._done[descriptor] + self._heard.get(descriptor, 0)
            if descriptor in self._heard:  # more of its messages may just have come
                done = max(done, last)
            else:
                held[descriptor] = received - done
            self._last[descriptor], self._done[descriptor] = received, done
        self._heard.clear()
        return self._cut(held)

    def _cut(self, held: dict[int, int]) -> list[int]:
        cut = [descriptor for descriptor, count in held.items() if count > MAX_HELD_BYTES]
        left = {descriptor: count for descriptor, count in held.items() if count <= MAX_HELD_BYTES}
        while sum(left.values()) > MAX_ALL_BYTES:
            cut.append(max(left, key=left.__getitem__))
            del left[cut[-1]]
        for descriptor in cut:
            _hang_up(descriptor)
        return cut

    def _follow(self) -> None:
        """Learn which connections there are."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            descriptor = int(event["value"])
            self._last.pop(descriptor, None)
            self._done.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._last[descriptor] = self._done[descriptor] = 0

    def close(self) -> None:
        """Watch no more. Before the socket is closed."""
        self._router.disable_monitor()  # first: libzmq's thread would wait for who reads no more
        self._monitor.close(0)


def _borrowed(descriptor: int) -> socket.socket | None:
    """libzmq's connection, to be closed again; None if it is gone."""
    try:
        return socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None


def _received(descriptor: int) -> int | None:
    """The bytes that a TCP connection has received; None for another or none."""
    end = _borrowed(descriptor)
    if end is None:
        return None
    with end:
        try:
            return int(struct.unpack_from("Q", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), _RECEIVED)[0])
        except (OSError, struct.error):
            return None


def _hang_up(descriptor: int) -> None:
    end = _borrowed(descriptor)
    if end is not None:
        with end:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                return
