"""The supervisor's line to a process that it started: msgpack messages over a socket pair.

Its end closes with the process, however that dies.
"""

import contextlib
import socket
import threading
from typing import Any

import msgspec

_LENGTH = 4
_MAX_MESSAGE = 1 << 25  # settings may name 4,096 adapters, each at a path of 4 KiB


class ChannelClosed(ConnectionError):
    """The other process is gone."""


class Channel:
    """One end. `send` blocks (messages are few and small); `receive` takes what has arrived.

    Several threads may send, one receives.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> tuple["Channel", socket.socket]:
        """(this process's end, the other end to be handed to a child)."""
        mine, theirs = socket.socketpair()
        return cls(mine), theirs

    @classmethod
    def from_fd(cls, fd: int) -> "Channel":
        """The end that a child was given."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Raises ChannelClosed when nobody listens any more."""
        try:
            with self._sending:
                self._socket.sendall(_frame(message))
        except OSError as error:
            raise ChannelClosed("the other process is gone") from error

    def beat(self) -> None:
        """Say that this process is alive. Never waits: to a process that does not read, or is gone, nothing is sent."""
        # so short that the socket takes all of it or nothing
        with self._sending, contextlib.suppress(OSError):
            self._socket.send(_BEAT, socket.MSG_DONTWAIT)

    def receive(self, block: bool = False) -> list[dict[str, Any]]:
        """Messages that have arrived, perhaps none (`block`: at least one).

        Raises ChannelClosed at the end of the line.
        """
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = self._socket.recv(1 << 16, 0 if block and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except OSError:
                data = b""  # it died, and left something unread
            if not data:
                if messages:
                    return messages  # the next call finds the end again
                raise ChannelClosed("the other process is gone")
            self._buffer += data
            messages += self._take()

    def _take(self) -> list[dict[str, Any]]:
        messages = []
        while len(self._buffer) >= _LENGTH:
            length = int.from_bytes(self._buffer[:_LENGTH], "big")
            if length > _MAX_MESSAGE:
                raise ChannelClosed("the other process sends nonsense")
            if len(self._buffer) < _LENGTH + length:
                break
            messages.append(msgspec.msgpack.decode(self._buffer[_LENGTH : _LENGTH + length], type=dict[str, Any]))
            del self._buffer[: _LENGTH + length]
        return messages

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _frame(message: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH, "big") + body


_BEAT = _frame({"event": "beat"})
