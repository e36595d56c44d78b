"""The server's side of ZMTP 3.1 without encryption: greeting, READY, and messages of one frame. Knows no socket.

libzmq's own ROUTER cannot serve peers that nobody has admitted: it keeps all parts of an unfinished message, it aborts
the process when a peer claims the routing id that the next one would get, and when a connection breaks while it has
stopped reading and a heartbeat is due. Here a peer has no say in what it is called, the parts of a long message are
dropped as they come, and what is kept of a peer is one frame and one read.
"""

from .messages import MAX_FRAME_BYTES

MAX_PARTS = 64
"""Frames of one message, which should have one; a peer that sends more is cut off."""
MAX_COMMAND_BYTES = 4096
MORE, LONG, COMMAND = 1, 2, 4
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
SEVERAL = b""
"""What stands for a message of several frames; as a frame of the protocol has a header, nothing else is empty."""
_PEERS = (b"DEALER", b"ROUTER", b"REQ")


class ZmtpError(ValueError):
    """A peer does not speak ZMTP as it should, and is to be cut off."""


def head(size: int, flags: int = 0) -> bytes:
    """The bytes before a frame of `size` bytes."""
    return bytes((flags, size)) if size < 256 else bytes((flags | LONG,)) + size.to_bytes(8, "big")


def command(name: bytes, rest: bytes) -> bytes:
    """A command as a frame."""
    body = bytes((len(name),)) + name + rest
    return head(len(body), COMMAND) + body


def metadata(name: bytes, value: bytes) -> bytes:
    """A property of READY."""
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


READY = command(b"READY", metadata(b"Socket-Type", b"ROUTER"))


class Reader:
    """One peer's bytes, cut into messages. `replies` is what the peer is to be sent for them: READY, PONG."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeted = False
        self._parts = 0
        self.ready = False
        self.replies = bytearray()

    def __len__(self) -> int:
        """Bytes that are kept."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Bytes have arrived."""
        self._buffer += data

    def take(self) -> bytes | None:
        """The next message, SEVERAL for one of several frames, or None if it has not arrived. Raises ZmtpError."""
        if not self._greeted and not self._greet():
            return None
        at, message = 0, None
        while message is None:
            place = self._frame(at)
            if place is None:
                break
            flags, first, at = self._buffer[at], *place
            if flags & COMMAND:
                self._command(bytes(self._buffer[first:at]))
            elif not self.ready:
                raise ZmtpError("a message before READY")
            elif flags & MORE:
                self._parts += 1
                if self._parts >= MAX_PARTS:
                    raise ZmtpError(f"a message of more than {MAX_PARTS} frames")
            elif self._parts or at == first:
                self._parts, message = 0, SEVERAL
            else:
                message = bytes(self._buffer[first:at])
        del self._buffer[:at]
        return message

    def _greet(self) -> bool:
        known = self._buffer[: len(GREETING)]
        if (known[:1] != SIGNATURE[:1] and known) or (len(known) > 9 and known[9:10] != SIGNATURE[9:]):
            raise ZmtpError("not a ZMTP greeting")
        if len(known) < len(GREETING):
            return False
        if known[10] < 3 or known[12:32] != GREETING[12:32]:
            raise ZmtpError("another version, or encrypted")
        self._greeted = True
        del self._buffer[: len(GREETING)]
        return True

    def _frame(self, at: int) -> tuple[int, int] | None:
        """Where the frame that begins at `at` has its body; None if it has not arrived."""
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
            raise ZmtpError("a frame above the limit")
        return (first, first + size) if first + size <= len(buffer) else None

    def _command(self, body: bytes) -> None:
        name, rest = (body[1 : 1 + body[0]], body[1 + body[0] :]) if body else (b"", b"")
        if name == b"READY" and not self.ready:
            if _properties(rest).get(b"socket-type") not in _PEERS:
                raise ZmtpError("a socket that does not speak with a ROUTER")
            self.ready = True
            self.replies += READY
        elif name == b"PING" and self.ready and 2 <= len(rest) <= 18:
            self.replies += command(b"PONG", rest[2:])
        elif not self.ready or name == b"ERROR":
            raise ZmtpError("no READY")


def _properties(data: bytes) -> dict[bytes, bytes]:
    """What READY says, names in lower case. An `Identity` among them is nobody's business here."""
    found, at = {}, 0
    while at < len(data):
        value = at + 1 + data[at] + 4
        end = value + int.from_bytes(data[value - 4 : value], "big")
        if end > len(data):
            raise ZmtpError("a READY that is cut off")
        found[data[at + 1 : value - 4].lower()] = data[value:end]
        at = end
    return found
