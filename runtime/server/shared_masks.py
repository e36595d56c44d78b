"""Shared memory in which the batcher fills token masks and the GPU process reads them.

64 constrained requests have a megabyte of masks per step; sending it through a socket would take longer than filling
it. The memory has no name, so the kernel frees it when the last process that maps it ends.
"""

import mmap
import os
from typing import Self

import numpy as np

from ..scheduler.step_plan import Int32

STEPS = 2
"""Number of steps with their own part of the memory. The masks of a step are filled after the tokens of the previous
step have arrived, and so after the masks of that step have been read.
"""


class SharedMasks:
    """One process's view. `path`: where other processes of the same user open the memory."""

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        size = os.fstat(fd).st_size
        self._bytes = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        self._step_bytes = size // STEPS
        self._step = 0

    @classmethod
    def create(cls, rows: int, words: int) -> Self:
        """Create memory for `rows` masks of `words` int32 words per step. Raises OSError or ValueError."""
        fd = os.memfd_create("sidestream-masks")
        try:
            os.truncate(fd, STEPS * rows * words * 4)
            return cls(fd, f"/proc/{os.getpid()}/fd/{fd}")
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, path: str) -> Self:
        """Map the memory of another process. Raises OSError or ValueError."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd, path)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Drop this view. The memory is unmapped when its masks are no longer used."""
        self._bytes, self._step_bytes = np.zeros(0, np.uint8), 0

    def allocate(self, count: int, words: int) -> Int32 | None:
        """Return the next step's masks, int32 [count, words]; None if they do not fit."""
        size = count * words * 4
        if size > self._step_bytes:
            return None
        self._step = (self._step + 1) % STEPS
        first = self._step * self._step_bytes
        return self._bytes[first : first + size].view(np.int32).reshape(count, words)

    def find(self, masks: Int32) -> tuple[int, int] | None:
        """Return (offset, row stride), in bytes, of masks [N, W] in this memory; None for others."""
        offset = _address(masks) - _address(self._bytes)
        stride, word = masks.strides
        last = offset + (len(masks) - 1) * stride + masks.shape[1] * word
        inside = len(masks) > 0 and word == 4 and offset >= 0 and last <= len(self._bytes)
        return (offset, stride) if inside else None

    def masks(self, offset: int, stride: int, count: int, words: int) -> Int32:
        """Return masks [count, words] that the other process found here. Raises ValueError outside the memory."""
        if min(offset, count, words) < 0 or stride < 4 * words or offset + count * stride > len(self._bytes):
            raise ValueError(f"{count} masks of {words} words at {offset} exceed the {len(self._bytes)} shared bytes")
        rows = self._bytes[offset : offset + count * stride].reshape(count, stride)
        return rows[:, : 4 * words].view(np.int32)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
