"""Messages between a supervisor and a process that it started: msgpack over a socket pair.

A channel closes when either process ends, however it ends.
"""

import contextlib
import socket
import threading
from typing import Any

import msgspec

_LENGTH_BYTES = 4
_MAX_MESSAGE = 1 << 25  # settings may name 4,096 adapters, each at a path of 4 KiB


class ChannelClosed(ConnectionError):
    """The other process has ended or closed the channel."""


class Channel:
    """One end of a channel. Several threads may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> tuple["Channel", socket.socket]:
        """Return (this process's end, the socket to pass to a child)."""
        mine, theirs = socket.socketpair()
        return cls(mine), theirs

    @classmethod
    def from_fd(cls, fd: int) -> "Channel":
        """Return the end that a child inherited."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; blocks while the socket is full. Raises ChannelClosed."""
        try:
            with self._sending:
                self._socket.sendall(_frame(message))
        except OSError as error:
            raise ChannelClosed("the other process has ended") from error

    def send_heartbeat(self) -> None:
        """Send a heartbeat. Never blocks; sends nothing if the other process does not read or has ended."""
        # so short that the socket takes all of it or nothing
        with self._sending, contextlib.suppress(OSError):
            self._socket.send(_HEARTBEAT, socket.MSG_DONTWAIT)

    def receive(self, block: bool = False) -> list[dict[str, Any]]:
        """Return the messages that have arrived, possibly none (`block`: at least one). Raises ChannelClosed."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = self._socket.recv(1 << 16, 0 if block and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except OSError:
                data = b""  # the other process ended and left something unread
            if not data:
                if messages:
                    return messages  # the next call raises
                raise ChannelClosed("the other process has ended")
            self._buffer += data
            messages += self._decode_buffer()

    def _decode_buffer(self) -> list[dict[str, Any]]:
        messages = []
        while len(self._buffer) >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if length > _MAX_MESSAGE:
                raise ChannelClosed(f"a message has {length} bytes; the limit is {_MAX_MESSAGE}")
            end = _LENGTH_BYTES + length
            if len(self._buffer) < end:
                break
            messages.append(msgspec.msgpack.decode(self._buffer[_LENGTH_BYTES:end], type=dict[str, Any]))
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        self._socket.close()


def _frame(message: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


_HEARTBEAT = _frame({"event": "beat"})
