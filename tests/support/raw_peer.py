"""A peer that speaks ZMTP by itself, and as badly as a test wants: over a plain socket, without libzmq."""

import contextlib
import socket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, COMMAND = 1, 4


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame; long ones have eight bytes of length."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body


def ready(identity: bytes | None = None) -> bytes:
    """READY of a DEALER, which may claim a routing id."""
    properties = {b"Socket-Type": b"DEALER"} | ({} if identity is None else {b"Identity": identity})
    body = b"\x05READY"
    for name, value in properties.items():
        body += bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
    return frame(body, COMMAND)


PING = frame(b"\x04PING\x00\x00x", COMMAND)


class RawPeer:
    """Connected and greeted."""

    def __init__(self, address: str, identity: bytes | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address.removeprefix("ipc://"))
        self.socket.sendall(GREETING + ready(identity))
        self.read(64)

    def read(self, count: int) -> bytes:
        """So many bytes."""
        self.socket.settimeout(60)
        data = b""
        while len(data) < count and (part := self.socket.recv(count - len(data))):
            data += part
        return data

    def pour(self, data: bytes, times: int, patience: float = 5.0) -> int:
        """Send `data` again and again, until the server reads nothing for `patience` seconds; how often it did."""
        self.socket.settimeout(patience)
        for done in range(times):
            try:
                self.socket.sendall(data)
            except OSError:
                return done
        return times

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.socket.close()
