"""Sockets that clients connect to.

Without keys `OpenListener` implements ZMTP itself, for the reasons in `protocol.zmtp`. With keys `CurveListener` uses
libzmq, which admits only clients with an allowed key. Both have the same methods.
"""

import ctypes
import errno
import os
import select
import socket
import time
from collections import deque
from typing import Any

import zmq

from ..protocol.addresses import Address
from ..protocol.curve_keys import ServerKeys, ZapHandler
from ..protocol.messages import MAX_FRAME_BYTES
from ..protocol.partial_messages import PartialMessageLimit
from ..protocol.zmtp import GREETING, MULTIPART, Reader, ZmtpError, frame_header

BACKLOG = 512
MAX_PEERS = 2048
READ_BYTES = 256 << 10
MAX_BUFFERED_BYTES = 256 << 20
"""Limit on the unfinished frames of all peers; above it the peer with the most bytes is disconnected."""
MAX_OUT_BYTES = 4 << 20
"""Limit on the unsent bytes of a peer, above which nothing more is queued for it."""
MAX_REPLY_BYTES = 1 << 20
"""Limit on unread answers to PING, on top of that and one frame; above it the peer is disconnected."""
FIRST_FRAME_SECONDS = 5.0
"""Time limit for a peer's first frame."""
SEND_HWM = 256


class _Peer:
    def __init__(self, identity: bytes, end: socket.socket) -> None:
        self.identity, self.end = identity, end
        self.fd = end.fileno()
        self.reader = Reader()
        self.message: bytes | None = None
        self.out = bytearray(GREETING)
        self.arrived = time.monotonic()
        self.watches_output = False


class OpenListener:
    """Unencrypted connections. They take turns, one frame each."""

    def __init__(self, address: Address) -> None:
        self._socket = _bound(address)
        self.address = str(address)
        if address.path is None:
            self.address = str(Address("tcp", host=address.host, port=self._socket.getsockname()[1]))
        self._file = address.path
        self._inode = None if address.path is None else address.path.stat().st_ino
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._peers: dict[bytes, _Peer] = {}
        self._without_frame: dict[bytes, _Peer] = {}
        self._by_fd: dict[int, _Peer] = {}
        self._ready: deque[_Peer] = deque()
        self._disconnected: list[bytes] = []
        self._buffered = 0
        self._num_accepted = 0

    @property
    def source(self) -> Any:
        """A source for zmq.Poller, readable when `poll` or `receive` may have something."""
        return self._epoll.fileno()

    @property
    def pending(self) -> bool:
        """Whether `receive` has something that `source` does not show."""
        return bool(self._ready)

    def poll(self) -> None:
        """Accept, read and write once per connection; call it before a series of `receive`."""
        for fd, events in self._epoll.poll(0, MAX_PEERS + 1):
            peer = self._by_fd.get(fd)
            if peer is None:
                if fd == self._socket.fileno():
                    self._accept()
                continue
            if events & select.EPOLLOUT:
                self._write(peer)
            if events & ~select.EPOLLOUT and peer.message is None and peer.fd in self._by_fd:
                self._read(peer)
        self._drop_silent()

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return (connection id, frame), or None. The frame is empty for a message of several frames."""
        while self._ready:
            peer = self._ready.popleft()
            if peer.message is None or peer.fd < 0:
                continue
            message = peer.message
            self._parse(peer)
            return peer.identity, message
        return None

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send a frame. Raises BlockingIOError while the peer's queue is full, ConnectionError if it disconnected."""
        peer = self._peers.get(identity)
        if peer is None:
            raise ConnectionError("the connection has ended")
        if len(peer.out) >= MAX_OUT_BYTES:
            raise BlockingIOError(errno.EAGAIN, "the peer does not read")
        quiet = not peer.out
        peer.out += frame_header(len(frame))
        peer.out += frame
        if quiet:  # else epoll reports when the socket accepts more
            self._write(peer)
            if peer.fd < 0:
                raise ConnectionError("the connection has ended")

    def drop(self, identity: bytes) -> None:
        peer = self._peers.pop(identity, None)
        if peer is not None:
            self._without_frame.pop(identity, None)
            self._buffered -= len(peer.reader)
            self._by_fd.pop(peer.fd)
            self._epoll.unregister(peer.fd)
            peer.end.close()
            peer.fd, peer.message = -1, None
            self._disconnected.append(identity)

    def take_disconnected(self) -> list[bytes]:
        """Return the ids of connections that have ended since the last call."""
        disconnected, self._disconnected = self._disconnected, []
        return disconnected

    def close(self, seconds: float) -> None:
        """Send queued frames for at most `seconds`, close all connections, and remove the socket file if it is ours."""
        if self._epoll.closed:
            return
        self._socket.close()
        if self._file is not None and self._file.exists() and self._file.stat().st_ino == self._inode:
            self._file.unlink(missing_ok=True)
        until = time.monotonic() + seconds
        while any(peer.out for peer in self._peers.values()) and time.monotonic() < until:
            for peer in list(self._peers.values()):
                self._write(peer)
            time.sleep(0.01)
        for identity in list(self._peers):
            self.drop(identity)
        self._epoll.close()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # no descriptor is free: the connection stays in the backlog
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_oldest_without_frame():
                    return
                continue
            if len(self._peers) >= MAX_PEERS and not self._drop_oldest_without_frame():
                end.close()
                continue
            end.setblocking(False)
            if end.family != socket.AF_UNIX:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._num_accepted += 1
            peer = _Peer(b"%d" % self._num_accepted, end)
            self._peers[peer.identity] = self._without_frame[peer.identity] = self._by_fd[peer.fd] = peer
            self._epoll.register(peer.fd, select.EPOLLIN)
            self._write(peer)

    def _drop_oldest_without_frame(self) -> bool:
        """Close the oldest connection without a frame; returns False if there is none."""
        if not self._without_frame:
            return False
        self.drop(next(iter(self._without_frame)))
        return True

    def _drop_silent(self) -> None:
        late = time.monotonic() - FIRST_FRAME_SECONDS
        while self._without_frame and (peer := next(iter(self._without_frame.values()))).arrived < late:
            self.drop(peer.identity)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.end.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(peer.identity)
            return
        self._buffered += len(data)
        peer.reader.feed(data)
        self._parse(peer, len(data))
        while self._buffered > MAX_BUFFERED_BYTES:
            self.drop(max(self._peers.values(), key=lambda each: len(each.reader)).identity)

    def _parse(self, peer: _Peer, fed: int = 0) -> None:
        before = len(peer.reader)
        try:
            peer.message = peer.reader.next_message()
        except ZmtpError:
            self._buffered -= before - len(peer.reader)
            self.drop(peer.identity)
            return
        self._buffered -= before - len(peer.reader)
        if peer.message is not None:
            self._without_frame.pop(peer.identity, None)
            self._ready.append(peer)
        if peer.reader.replies:
            peer.out += peer.reader.replies
            peer.reader.replies.clear()
            if len(peer.out) > MAX_OUT_BYTES + MAX_FRAME_BYTES + MAX_REPLY_BYTES:
                self.drop(peer.identity)
            else:
                self._write(peer)

    def _write(self, peer: _Peer) -> None:
        try:
            while peer.out:
                sent = peer.end.send(peer.out, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del peer.out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.drop(peer.identity)
            return
        if peer.watches_output != bool(peer.out):
            peer.watches_output = bool(peer.out)
            self._epoll.modify(peer.fd, select.EPOLLIN | (select.EPOLLOUT if peer.out else 0))


class CurveListener:
    """A ROUTER of libzmq that admits clients with allowed keys; methods as in `OpenListener`.

    ZMTP's heartbeats are off, as the protocol has its own: libzmq aborts if one is due when a connection breaks while
    reading is paused.
    """

    def __init__(self, context: "zmq.Context[Any]", address: Address, keys: ServerKeys) -> None:
        self._zap = ZapHandler(context, keys)
        # libzmq numbers routing ids from rand(), which gives the same start in each process without a seed
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "big"))
        self._router = router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.router_mandatory = True
        router.sndhwm = router.rcvhwm = SEND_HWM
        router.maxmsgsize = MAX_FRAME_BYTES
        router.setsockopt(zmq.HANDSHAKE_IVL, int(FIRST_FRAME_SECONDS * 1000))
        router.ipv6 = ":" in address.host
        keys.secure(router)
        try:
            router.bind(str(address))
        except zmq.ZMQError:
            self._zap.close()
            raise
        self._partial = PartialMessageLimit(router)
        bound = router.getsockopt(zmq.LAST_ENDPOINT)
        self.address = bound.decode().rstrip("\x00") if isinstance(bound, bytes) else str(address)

    @property
    def source(self) -> Any:
        return self._router

    @property
    def pending(self) -> bool:
        return False

    def poll(self) -> None:
        """Close connections with too long partial messages; libzmq accepts and reads in its own thread."""
        self._partial.check(queued=True)

    def receive(self) -> tuple[bytes, bytes] | None:
        try:
            identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._partial.check()
            return None
        self._partial.count_message(frames)
        return identity.bytes, frames[0].bytes if len(frames) == 1 else MULTIPART

    def send(self, identity: bytes, frame: bytes) -> None:
        try:
            self._router.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            raise BlockingIOError(errno.EAGAIN, "the peer does not read") from None
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, errno.EHOSTUNREACH):
                raise
            raise ConnectionError("the connection has ended") from error

    def drop(self, identity: bytes) -> None:
        """Do nothing: libzmq cannot close a single connection."""

    def take_disconnected(self) -> list[bytes]:
        """Return nothing: libzmq reports a lost connection only when sending."""
        return []

    def close(self, seconds: float) -> None:
        self._partial.close()
        self._router.close(int(seconds * 1000))
        self._zap.close()


Listener = OpenListener | CurveListener


def _bound(address: Address) -> socket.socket:
    """Return a listening socket. Replaces the socket file of a killed server. Raises OSError."""
    if address.path is not None:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: Any = str(address.path)
        address.path.unlink(missing_ok=True)
    else:
        bound = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target = (address.host, address.port)
    try:
        bound.bind(target)
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen at {address}: {error.strerror}") from None
    bound.listen(BACKLOG)
    bound.setblocking(False)
    return bound
