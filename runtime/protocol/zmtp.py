"""The server's side of ZMTP 3.1 without encryption: greeting, READY, and messages of one frame. Opens no socket.

libzmq's ROUTER is not safe with untrusted peers. It keeps all parts of an unfinished message; it aborts the process
when a peer claims the next routing id, and when a connection breaks while reading is paused and a heartbeat is due.
Here a peer cannot choose its id, parts of a multipart message are dropped as they arrive, and at most one frame and one
read are kept per peer.
"""

from .messages import MAX_FRAME_BYTES

MAX_PARTS = 64
"""Limit on the frames of one message, which should have one; more close the connection."""
MAX_COMMAND_BYTES = 4096
MORE, LONG, COMMAND = 1, 2, 4
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
MULTIPART = b""
"""Returned in place of a message of several frames. A frame of the protocol has a header, so it is never empty."""
_PEER_TYPES = (b"DEALER", b"ROUTER", b"REQ")


class ZmtpError(ValueError):
    """A peer violated ZMTP; its connection must be closed."""


def frame_header(size: int, flags: int = 0) -> bytes:
    """Return the bytes before a frame's body of `size` bytes."""
    return bytes((flags, size)) if size < 256 else bytes((flags | LONG,)) + size.to_bytes(8, "big")


def command(name: bytes, data: bytes) -> bytes:
    body = bytes((len(name),)) + name + data
    return frame_header(len(body), COMMAND) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


READY = command(b"READY", _property(b"Socket-Type", b"ROUTER"))


class Reader:
    """Splits one peer's bytes into messages. `replies` collects bytes to send to the peer: READY and PONG."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeted = False
        self._parts = 0
        self.ready = False
        self.replies = bytearray()

    def __len__(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_message(self) -> bytes | None:
        """Return the next message, MULTIPART for one of several frames, None if it is incomplete. Raises ZmtpError."""
        if not self._greeted and not self._read_greeting():
            return None
        at, message = 0, None
        while message is None:
            body = self._body_at(at)
            if body is None:
                break
            flags, first, at = self._buffer[at], *body
            if flags & COMMAND:
                self._run_command(bytes(self._buffer[first:at]))
            elif not self.ready:
                raise ZmtpError("a message before READY")
            elif flags & MORE:
                self._parts += 1
                if self._parts >= MAX_PARTS:
                    raise ZmtpError(f"a message of more than {MAX_PARTS} frames")
            elif self._parts or at == first:
                self._parts, message = 0, MULTIPART
            else:
                message = bytes(self._buffer[first:at])
        del self._buffer[:at]
        return message

    def _read_greeting(self) -> bool:
        greeting = self._buffer[: len(GREETING)]
        if (greeting[:1] != SIGNATURE[:1] and greeting) or (len(greeting) > 9 and greeting[9:10] != SIGNATURE[9:]):
            raise ZmtpError("no ZMTP greeting")
        if len(greeting) < len(GREETING):
            return False
        if greeting[10] < 3 or greeting[12:32] != GREETING[12:32]:
            raise ZmtpError("a version below 3, or a mechanism other than NULL")
        self._greeted = True
        del self._buffer[: len(GREETING)]
        return True

    def _body_at(self, at: int) -> tuple[int, int] | None:
        """Return (start, end) of the body of the frame that begins at `at`; None if it is incomplete."""
        buffer = self._buffer
        if len(buffer) - at < 2:
            return None
        flags = buffer[at]
        if flags > 7 or (flags & COMMAND and flags & MORE):
            raise ZmtpError("a frame with unknown flags")
        if flags & LONG:
            if len(buffer) - at < 9:
                return None
            first, size = at + 9, int.from_bytes(buffer[at + 1 : at + 9], "big")
        else:
            first, size = at + 2, buffer[at + 1]
        if size > (MAX_COMMAND_BYTES if flags & COMMAND else MAX_FRAME_BYTES):
            raise ZmtpError(f"a frame of {size} bytes exceeds the limit")
        return (first, first + size) if first + size <= len(buffer) else None

    def _run_command(self, body: bytes) -> None:
        name, data = (body[1 : 1 + body[0]], body[1 + body[0] :]) if body else (b"", b"")
        if name == b"READY" and not self.ready:
            if _properties(data).get(b"socket-type") not in _PEER_TYPES:
                raise ZmtpError("a socket type that cannot connect to a ROUTER")
            self.ready = True
            self.replies += READY
        elif name == b"PING" and self.ready and 2 <= len(data) <= 18:
            self.replies += command(b"PONG", data[2:])
        elif not self.ready or name == b"ERROR":
            raise ZmtpError("no READY")


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return the properties of READY, names in lower case. A peer's `Identity` is ignored."""
    properties, at = {}, 0
    while at < len(data):
        value = at + 1 + data[at] + 4
        end = value + int.from_bytes(data[value - 4 : value], "big")
        if end > len(data):
            raise ZmtpError("a truncated READY")
        properties[data[at + 1 : value - 4].lower()] = data[value:end]
        at = end
    return properties
