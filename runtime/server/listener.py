"""Where clients connect: frames in, frames out, and the news that a connection is gone.

Without keys `OpenListener` speaks ZMTP itself (`wire/zmtp.py` says why); with keys `CurveListener` leaves it to libzmq,
which admits only peers that hold an allowed key.
"""

import ctypes
import errno
import os
import select
import socket
import time
from collections import deque
from typing import Any, Protocol

import zmq

from ..protocol.addresses import Address
from ..protocol.curve_keys import Gate, ServerKeys
from ..protocol.inflow import Inflow
from ..protocol.messages import MAX_FRAME_BYTES
from ..protocol.zmtp import GREETING, SEVERAL, Reader, ZmtpError, head

BACKLOG = 512
MAX_PEERS = 2048
READ_BYTES = 256 << 10
MAX_KEPT_BYTES = 256 << 20
"""What all peers' unfinished frames may take; above it the peer that holds the most is cut off."""
MAX_OUT_BYTES = 4 << 20
"""A peer is sent nothing more while so much waits for it."""
MAX_REPLY_BYTES = 1 << 20
"""Answers to PING may wait on top of that and of one frame; a peer that leaves more unread is cut off."""
SILENT_SECONDS = 5.0
"""A peer has so long to send its first frame."""
SEND_HWM = 256


class Listener(Protocol):
    """What the batcher needs of one."""

    address: str

    @property
    def source(self) -> Any:
        """For zmq.Poller: readable when `look` or `receive` may have something."""
        ...

    def look(self) -> None:
        """See what has arrived: once before a series of `receive`."""
        ...

    def receive(self) -> tuple[bytes, bytes] | None:
        """(the connection's id, a frame; empty for a message that is not one frame), or None."""
        ...

    def send(self, identity: bytes, frame: bytes) -> None:
        """Raises BlockingIOError while the peer does not take more, ConnectionError when it is gone."""
        ...

    def drop(self, identity: bytes) -> None:
        """Cut a connection."""
        ...

    def take_gone(self) -> list[bytes]:
        """The connections that have ended since the last call, as far as that is known."""
        ...

    @property
    def pending(self) -> bool:
        """Whether `receive` has something that `source` does not show."""
        ...

    def close(self, seconds: float) -> None:
        """Let what was sent go out for so long, then hang up."""
        ...


class _Peer:
    def __init__(self, identity: bytes, end: socket.socket) -> None:
        self.identity, self.end = identity, end
        self.fd = end.fileno()
        self.reader = Reader()
        self.message: bytes | None = None
        self.out = bytearray(GREETING)
        self.arrived = time.monotonic()
        self.waits = False


class OpenListener:
    """Unencrypted connections, one `_Peer` each; connections take turns, a frame each."""

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
        self._silent: dict[bytes, _Peer] = {}
        self._by_fd: dict[int, _Peer] = {}
        self._ready: deque[_Peer] = deque()
        self._gone: list[bytes] = []
        self._kept = 0
        self._arrivals = 0

    @property
    def source(self) -> Any:
        """See `Listener`."""
        return self._epoll.fileno()

    @property
    def pending(self) -> bool:
        """See `Listener`."""
        return bool(self._ready)

    def look(self) -> None:
        """Accept, read and write what can be, once for each connection."""
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
        self._cut_silent()

    def receive(self) -> tuple[bytes, bytes] | None:
        """See `Listener`."""
        while self._ready:
            peer = self._ready.popleft()
            if peer.message is None or peer.fd < 0:
                continue
            message = peer.message
            self._next(peer)
            return peer.identity, message
        return None

    def send(self, identity: bytes, frame: bytes) -> None:
        """See `Listener`."""
        peer = self._peers.get(identity)
        if peer is None:
            raise ConnectionError("the connection is gone")
        if len(peer.out) >= MAX_OUT_BYTES:
            raise BlockingIOError(errno.EAGAIN, "the peer does not read")
        quiet = not peer.out
        peer.out += head(len(frame))
        peer.out += frame
        if quiet:  # else epoll tells when there is room
            self._write(peer)
            if peer.fd < 0:
                raise ConnectionError("the connection is gone")

    def drop(self, identity: bytes) -> None:
        """See `Listener`."""
        peer = self._peers.pop(identity, None)
        if peer is not None:
            self._silent.pop(identity, None)
            self._kept -= len(peer.reader)
            self._by_fd.pop(peer.fd)
            self._epoll.unregister(peer.fd)
            peer.end.close()
            peer.fd, peer.message = -1, None
            self._gone.append(identity)

    def take_gone(self) -> list[bytes]:
        """See `Listener`."""
        gone, self._gone = self._gone, []
        return gone

    def close(self, seconds: float) -> None:
        """See `Listener`. The socket's file goes, unless another server has put its own there."""
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
                # out of descriptors: the connection stays in the backlog until there is one
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._make_room():
                    return
                continue
            if len(self._peers) >= MAX_PEERS and not self._make_room():
                end.close()
                continue
            end.setblocking(False)
            if end.family != socket.AF_UNIX:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._arrivals += 1
            peer = _Peer(b"%d" % self._arrivals, end)
            self._peers[peer.identity] = self._silent[peer.identity] = self._by_fd[peer.fd] = peer
            self._epoll.register(peer.fd, select.EPOLLIN)
            self._write(peer)

    def _make_room(self) -> bool:
        """Cut the peer that has been here longest without a frame, if there is one."""
        if not self._silent:
            return False
        self.drop(next(iter(self._silent)))
        return True

    def _cut_silent(self) -> None:
        late = time.monotonic() - SILENT_SECONDS
        while self._silent and (peer := next(iter(self._silent.values()))).arrived < late:
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
        self._kept += len(data)
        peer.reader.feed(data)
        self._next(peer, len(data))
        while self._kept > MAX_KEPT_BYTES:
            self.drop(max(self._peers.values(), key=lambda each: len(each.reader)).identity)

    def _next(self, peer: _Peer, fed: int = 0) -> None:
        """Have the peer's next message ready."""
        before = len(peer.reader)
        try:
            peer.message = peer.reader.take()
        except ZmtpError:
            self._kept -= before - len(peer.reader)
            self.drop(peer.identity)
            return
        self._kept -= before - len(peer.reader)
        if peer.message is not None:
            self._silent.pop(peer.identity, None)
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
        if peer.waits != bool(peer.out):
            peer.waits = bool(peer.out)
            self._epoll.modify(peer.fd, select.EPOLLIN | (select.EPOLLOUT if peer.out else 0))


class CurveListener:
    """A ROUTER of libzmq that admits the holders of allowed keys.

    ZMTP's own heartbeats are off: one that is due when a connection breaks while its input is stopped would abort the
    process. The protocol has its own.
    """

    def __init__(self, context: "zmq.Context[Any]", address: Address, keys: ServerKeys) -> None:
        self._gate = Gate(context, keys)
        # libzmq counts routing ids up from rand(), whose start is the same in each process unless somebody seeds it
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "big"))
        self._router = router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.router_mandatory = True
        router.sndhwm = router.rcvhwm = SEND_HWM
        router.maxmsgsize = MAX_FRAME_BYTES
        router.setsockopt(zmq.HANDSHAKE_IVL, int(SILENT_SECONDS * 1000))
        router.ipv6 = ":" in address.host
        keys.secure(router)
        try:
            router.bind(str(address))
        except zmq.ZMQError:
            self._gate.close()
            raise
        self._inflow = Inflow(router)
        bound = router.getsockopt(zmq.LAST_ENDPOINT)
        self.address = bound.decode().rstrip("\x00") if isinstance(bound, bytes) else str(address)

    @property
    def source(self) -> Any:
        """See `Listener`."""
        return self._router

    @property
    def pending(self) -> bool:
        """The poller sees what libzmq has read."""
        return False

    def look(self) -> None:
        """libzmq reads by itself; a message without an end is cut off."""
        self._inflow.look(waiting=True)

    def receive(self) -> tuple[bytes, bytes] | None:
        """See `Listener`."""
        try:
            identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._inflow.look()
            return None
        self._inflow.came(frames)
        return identity.bytes, frames[0].bytes if len(frames) == 1 else SEVERAL

    def send(self, identity: bytes, frame: bytes) -> None:
        """See `Listener`."""
        try:
            self._router.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            raise BlockingIOError(errno.EAGAIN, "the peer does not read") from None
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, errno.EHOSTUNREACH):
                raise
            raise ConnectionError("the connection is gone") from error

    def drop(self, identity: bytes) -> None:
        """libzmq has no way to cut one connection: it stays, forgotten."""

    def take_gone(self) -> list[bytes]:
        """libzmq does not tell; sending does."""
        return []

    def close(self, seconds: float) -> None:
        """See `Listener`."""
        self._inflow.close()
        self._router.close(int(seconds * 1000))
        self._gate.close()


def _bound(address: Address) -> socket.socket:
    """A listening socket; a socket file that a killed server left is replaced. Raises OSError."""
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
