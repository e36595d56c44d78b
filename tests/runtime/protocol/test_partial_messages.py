"""Peers of a libzmq socket that send messages without an end are found by the kernel's byte counts."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from sidestream.runtime.protocol import partial_messages
from sidestream.runtime.protocol.partial_messages import BUSY_CHECK_SECONDS, CHECK_SECONDS, PartialMessageLimit
from support.raw_peer import GREETING, MORE, frame, ready

MIB = 1 << 20


class Watched:
    """A ROUTER with an `PartialMessageLimit` with a simulated clock."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self.router = context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.now = 0.0
        self.limit = PartialMessageLimit(self.router, 0, lambda: self.now)
        self.peers: list[socket.socket] = []
        self.sent = self.messages = 0

    def peer(self) -> socket.socket:
        """One more, greeted."""
        peer = socket.create_connection(("127.0.0.1", self.port))
        peer.sendall(GREETING + ready())
        peer.settimeout(60)
        left = 64 + 2
        while left:
            left -= len(peer.recv(left))
        self.peers.append(peer)
        return peer

    def send(self, peer: socket.socket, size: int, flags: int = 0) -> None:
        """A frame."""
        peer.sendall(frame(bytes(size), flags))
        self.messages += not flags

    def check(self, queued: bool = False) -> int:
        """Read all complete messages and check; return how many connections were closed."""
        end = time.monotonic() + 60
        while self.messages:
            assert time.monotonic() < end
            if self.router.poll(100):
                self.limit.count_message(self.router.recv_multipart(copy=False)[1:])
                self.messages -= 1
        time.sleep(0.2)  # what was sent has reached the kernel's other end
        self.now += CHECK_SECONDS
        return len(self.limit.check(queued))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(partial_messages, "MAX_CONNECTION_BYTES", 4 * MIB)
    monkeypatch.setattr(partial_messages, "MAX_TOTAL_BYTES", 7 * MIB)
    with zmq.Context() as context:
        made = Watched(context)
        yield made
        made.limit.close()
        for peer in made.peers:
            peer.close()
        context.destroy(0)


def is_cut(peer: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        peer.settimeout(5)
        while peer.recv(1000):
            pass
    return True


def test_a_message_without_an_end_is_cut_off_whatever_came_before(watched: Watched) -> None:
    honest, hostile = watched.peer(), watched.peer()
    for _ in range(5):
        for peer in (honest, hostile):
            for _ in range(3):
                watched.send(peer, 2 * MIB)
        assert watched.check() == 0, "more than a connection may hold, all of it in messages"
    for sent in range(1, 5):
        watched.send(honest, 3 * MIB)
        watched.send(hostile, MIB - 100, MORE)
        assert watched.check() == 0, sent
    watched.send(hostile, MIB, MORE)
    assert watched.check() == 1 and is_cut(hostile)
    watched.send(honest, MIB)
    assert watched.check() == 0


def test_ending_a_message_and_beginning_the_next_does_not_raise_the_limit(watched: Watched) -> None:
    """Whatever was in the messages that came before."""
    peer = watched.peer()
    for _ in range(9):
        watched.send(peer, 0)
        for _ in range(3):
            watched.send(peer, MIB, MORE)
        assert watched.check() == 0
        watched.send(peer, MIB // 2, MORE)
        assert watched.check() == 0
        watched.send(peer, 0)
        for _ in range(3):
            watched.send(peer, MIB, MORE)
        assert watched.check() == 0
        watched.send(peer, 0)
    for _ in range(5):
        watched.send(peer, MIB, MORE)
    watched.check()
    assert watched.check() == 1 and is_cut(peer)


def test_a_message_of_many_parts_that_ends_in_time_is_a_message(watched: Watched) -> None:
    peer = watched.peer()
    for _ in range(4):
        for _ in range(3):
            watched.send(peer, MIB, MORE)
            assert watched.check() == 0
        watched.send(peer, 0)
        assert watched.check() == 0


def test_together_they_may_not_hold_much_more_than_one(watched: Watched) -> None:
    peers = [watched.peer() for _ in range(4)]
    for peer, count in zip(peers, (1, 3, 2, 2), strict=True):
        for _ in range(count):
            watched.send(peer, MIB, MORE)
    assert watched.check() == 1 and is_cut(peers[1])
    assert watched.check() == 0


def test_a_descriptor_that_is_used_again_begins_again(watched: Watched) -> None:
    for _ in range(3):
        peer = watched.peer()
        for _ in range(3):
            watched.send(peer, MIB, MORE)
        assert watched.check() == 0
        open_files = len(os.listdir("/proc/self/fd"))
        peer.close()
        end = time.monotonic() + 60
        while len(os.listdir("/proc/self/fd")) > open_files - 2:  # libzmq closes its end in a thread of its own
            assert time.monotonic() < end
            time.sleep(0.01)


def test_checks_are_rare_and_rarer_while_messages_are_queued(watched: Watched) -> None:
    hostile = watched.peer()
    assert watched.check() == 0
    for _ in range(5):
        watched.send(hostile, MIB, MORE)
    time.sleep(0.3)
    assert watched.limit.check() == [], "the last check was just now"
    watched.now += BUSY_CHECK_SECONDS / 2
    assert watched.limit.check(queued=True) == []
    watched.now += BUSY_CHECK_SECONDS
    assert len(watched.limit.check(queued=True)) == 1
