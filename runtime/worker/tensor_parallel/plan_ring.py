"""Plans in memory that all ranks share: rank 0 writes each once, and every peer reads it there.

The memory has no name: it is gone with the last process that holds it, however that ends. Peers are told over their
channels how long a frame is; where it lies follows from those before it.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable

CAPACITY = 64 << 20
"""Bytes that may be under way. A step of 256 sequences with masks over 152,064 tokens takes 5 MB."""
_POSITION = struct.Struct("<q")
_HEADER = 4096
POLL_SECONDS = 0.0005


class PlanRing:
    """A ring of bytes with one writer and `readers` readers, each of which says how far it has read."""

    def __init__(self, fd: int, readers: int, capacity: int = CAPACITY) -> None:
        self.fd, self._readers, self._capacity = fd, readers, capacity
        self._memory = mmap.mmap(fd, _HEADER + capacity)
        self._at = 0

    @classmethod
    def create(cls, readers: int, capacity: int = CAPACITY) -> "PlanRing":
        """The writer's end; readers are given its descriptor."""
        fd = os.memfd_create("sidestream-plans")
        os.truncate(fd, _HEADER + capacity)
        return cls(fd, readers, capacity)

    def write(self, frame: bytes, check: Callable[[], None]) -> None:
        """Write a frame, waiting until the slowest reader leaves room; `check` is called meanwhile, and may raise.

        Raises ValueError for one that never fits.
        """
        if len(frame) > self._capacity:
            raise ValueError(f"a plan of {len(frame)} bytes is longer than the {self._capacity} that ranks share")
        while self._at + len(frame) - min(map(self._position, range(self._readers))) > self._capacity:
            check()
            time.sleep(POLL_SECONDS)
        start = self._at % self._capacity
        first = min(len(frame), self._capacity - start)
        self._memory[_HEADER + start : _HEADER + start + first] = frame[:first]
        self._memory[_HEADER : _HEADER + len(frame) - first] = frame[first:]
        self._at += len(frame)

    def read(self, reader: int, length: int) -> bytearray:
        """The next frame for a reader, which is `length` bytes long."""
        start = self._at % self._capacity
        first = min(length, self._capacity - start)
        frame = bytearray(self._memory[_HEADER + start : _HEADER + start + first])
        frame += self._memory[_HEADER : _HEADER + length - first]
        self._at += length
        _POSITION.pack_into(self._memory, reader * _POSITION.size, self._at)
        return frame

    def _position(self, reader: int) -> int:
        return int(_POSITION.unpack_from(self._memory, reader * _POSITION.size)[0])

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        os.close(self.fd)
