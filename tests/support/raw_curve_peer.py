"""A peer that holds a key, speaks CURVE (RFC 26) by itself, and then as badly as a test wants: over a plain socket,
without libzmq. Its cryptography is the libsodium that pyzmq brings.
"""

import contextlib
import ctypes
import ctypes.util
import os
import socket
from functools import lru_cache
from pathlib import Path

import pytest
import zmq
from sidestream.runtime.protocol.curve_keys import ClientKeys
from zmq.utils import z85

from .raw_peer import COMMAND, MORE, frame

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_ZEROS, _BOX_ZEROS = 32, 16  # before a text and before its box, as the library wants them


@lru_cache
def _sodium() -> ctypes.CDLL:
    bundled = Path(zmq.__file__).parent.parent / "pyzmq.libs"
    found = next(map(str, bundled.glob("libsodium*")), None) or ctypes.util.find_library("sodium")
    if found is None:
        pytest.skip("needs libsodium")
    library = ctypes.CDLL(found)
    library.sodium_init()
    return library


class _Box:
    """What two keys share."""

    def __init__(self, public: bytes, secret: bytes) -> None:
        self._shared = ctypes.create_string_buffer(32)
        assert _sodium().crypto_box_beforenm(self._shared, public, secret) == 0

    def seal(self, nonce: bytes, text: bytes) -> bytes:
        size = _ZEROS + len(text)
        out = ctypes.create_string_buffer(size)
        _sodium().crypto_box_afternm(out, bytes(_ZEROS) + text, ctypes.c_ulonglong(size), nonce, self._shared)
        return out.raw[_BOX_ZEROS:]

    def open(self, nonce: bytes, box: bytes) -> bytes:
        size = _BOX_ZEROS + len(box)
        out = ctypes.create_string_buffer(size)
        opened = _sodium().crypto_box_open_afternm(
            out, bytes(_BOX_ZEROS) + box, ctypes.c_ulonglong(size), nonce, self._shared
        )
        assert opened == 0
        return out.raw[_ZEROS:]


class RawCurvePeer:
    """Connected, known and ready."""

    def __init__(self, address: str, keys: ClientKeys) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(60)
        self._count = 0
        own, server = z85.decode(keys.secret), z85.decode(keys.server)
        public, secret = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
        _sodium().crypto_box_keypair(public, secret)
        to_server = _Box(server, secret.raw)
        self.socket.sendall(_GREETING)
        assert self._read(64)[12:17] == b"CURVE"
        count = self._next()
        box = to_server.seal(b"CurveZMQHELLO---" + count, bytes(64))
        self.socket.sendall(frame(b"\x05HELLO\x01\x00" + bytes(72) + public.raw + count + box, COMMAND))
        welcome = self._frame()[len(b"\x07WELCOME") :]
        text = to_server.open(b"WELCOME-" + welcome[:16], welcome[16:])
        passing, cookie = text[:32], text[32:]
        self._box = _Box(passing, secret.raw)
        vouch_nonce = os.urandom(16)
        vouch = _Box(passing, own).seal(b"VOUCH---" + vouch_nonce, public.raw + server)
        metadata = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        count = self._next()
        text = z85.decode(keys.public) + vouch_nonce + vouch + metadata
        box = self._box.seal(b"CurveZMQINITIATE" + count, text)
        self.socket.sendall(frame(b"\x08INITIATE" + cookie + count + box, COMMAND))
        assert self._frame().startswith(b"\x05READY")

    def message(self, body: bytes, flags: int = 0) -> bytes:
        """A frame of a message, encrypted; each is sent once."""
        count = self._next()
        return frame(b"\x07MESSAGE" + count + self._box.seal(b"CurveZMQMESSAGEC" + count, bytes((flags,)) + body))

    def pour(self, body: bytes, times: int, flags: int = MORE, patience: float = 5.0) -> int:
        """Send such frames until the server reads nothing for `patience` seconds or hangs up; how many it took."""
        self.socket.settimeout(patience)
        for done in range(times):
            try:
                self.socket.sendall(self.message(body, flags))
            except OSError:
                return done
        return times

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.socket.close()

    def _next(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(8, "big")

    def _frame(self) -> bytes:
        flags = self._read(1)[0]
        return self._read(int.from_bytes(self._read(8 if flags & 2 else 1), "big"))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (part := self.socket.recv(count - len(data))):
            data += part
        return data
