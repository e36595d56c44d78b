"""Memory in which the batcher fills masks and the GPU process reads them: a step of 64 constrained requests has a
megabyte, which would take longer through a socket than the masks take to be made.

The memory has no name: it is gone with the last process that holds it, however that ends.
"""

import mmap
import os
from typing import Self

import numpy as np

from ..scheduler.step_plan import Int32

STEPS = 2
"""Steps that have a place each. Masks of a step are begun when the tokens of the step before are known, and those were
sampled with masks that had been read.
"""


class SharedMasks:
    """One end of it. `path`: where other processes of the same user find it."""

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        size = os.fstat(fd).st_size
        self._bytes = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        self._share = size // STEPS
        self._step = 0

    @classmethod
    def create(cls, rows: int, words: int) -> Self:
        """With room for so many masks of so many words a step. The GPU process has it. Raises OSError or ValueError
        where there is no such memory.
        """
        fd = os.memfd_create("sidestream-masks")
        try:
            os.truncate(fd, STEPS * rows * words * 4)
            return cls(fd, f"/proc/{os.getpid()}/fd/{fd}")
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, path: str) -> Self:
        """The same memory. Raises OSError or ValueError where it cannot be had."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd, path)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of it, as soon as no masks that lie there are used any more. There is no room in it then."""
        self._bytes, self._share = np.zeros(0, np.uint8), 0

    def take(self, count: int, words: int) -> Int32 | None:
        """The next step's place, [count, words]; None where it has no room for so many."""
        size = count * words * 4
        if size > self._share:
            return None
        self._step = (self._step + 1) % STEPS
        first = self._step * self._share
        return self._bytes[first : first + size].view(np.int32).reshape(count, words)

    def find(self, masks: Int32) -> tuple[int, int] | None:
        """(offset, bytes from one row to the next) of masks [N, W] that lie here; None for others."""
        offset = _address(masks) - _address(self._bytes)
        stride, word = masks.strides
        last = offset + (len(masks) - 1) * stride + masks.shape[1] * word
        lies_here = len(masks) > 0 and word == 4 and offset >= 0 and last <= len(self._bytes)
        return (offset, stride) if lies_here else None

    def masks(self, offset: int, stride: int, count: int, words: int) -> Int32:
        """Masks that the other end has found here. Raises ValueError where they cannot be here."""
        if min(offset, count, words) < 0 or stride < 4 * words or offset + count * stride > len(self._bytes):
            raise ValueError(f"{count} masks of {words} words at {offset} do not lie in {len(self._bytes)} bytes")
        rows = self._bytes[offset : offset + count * stride].reshape(count, stride)
        return rows[:, : 4 * words].view(np.int32)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
