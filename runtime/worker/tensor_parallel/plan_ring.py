"""Ring buffer of step plans in shared memory: rank 0 writes each frame once, and every peer reads it.

The memory is anonymous and is freed with the last process that holds it. Peers receive a frame's length over their
channels; its offset follows from the frames before it.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable

CAPACITY = 64 << 20
"""Bytes of unread frames. A step of 256 sequences with masks over 152,064 tokens takes 5 MB."""
_POSITION = struct.Struct("<q")
_HEADER = 4096
POLL_SECONDS = 0.0005


class PlanRing:
    """A ring of bytes with one writer and `readers` readers, each with a read position in the header."""

    def __init__(self, fd: int, readers: int, capacity: int = CAPACITY) -> None:
        self.fd, self._readers, self._capacity = fd, readers, capacity
        self._memory = mmap.mmap(fd, _HEADER + capacity)
        self._offset = 0

    @classmethod
    def create(cls, readers: int, capacity: int = CAPACITY) -> "PlanRing":
        """Return the writer's end; readers use its descriptor."""
        fd = os.memfd_create("sidestream-plans")
        os.truncate(fd, _HEADER + capacity)
        return cls(fd, readers, capacity)

    def write(self, frame: bytes, check: Callable[[], None]) -> None:
        """Write a frame when there is space. `check` is polled and may raise. Raises ValueError if it is too large."""
        if len(frame) > self._capacity:
            raise ValueError(f"a plan of {len(frame)} bytes is longer than the {self._capacity} that ranks share")
        while self._offset + len(frame) - min(map(self._position, range(self._readers))) > self._capacity:
            check()
            time.sleep(POLL_SECONDS)
        start = self._offset % self._capacity
        first = min(len(frame), self._capacity - start)
        self._memory[_HEADER + start : _HEADER + start + first] = frame[:first]
        self._memory[_HEADER : _HEADER + len(frame) - first] = frame[first:]
        self._offset += len(frame)

    def read(self, reader: int, length: int) -> bytearray:
        """Return a reader's next frame, which has `length` bytes."""
        start = self._offset % self._capacity
        first = min(length, self._capacity - start)
        frame = bytearray(self._memory[_HEADER + start : _HEADER + start + first])
        frame += self._memory[_HEADER : _HEADER + length - first]
        self._offset += length
        _POSITION.pack_into(self._memory, reader * _POSITION.size, self._offset)
        return frame

    def _position(self, reader: int) -> int:
        return int(_POSITION.unpack_from(self._memory, reader * _POSITION.size)[0])

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
        os.close(self.fd)
