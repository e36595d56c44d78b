"""Tensors whose memory can be given back while an engine sleeps, and comes back at the same addresses."""

import contextlib
import mmap
from collections.abc import Mapping
from itertools import accumulate
from math import prod

import torch

from ..adapters.host_memory import host_bytes, page_lock
from .capacity import Specs
from .cuda_pages import CudaPages

ALIGNMENT = 512  # bytes, as torch's own allocator aligns
LOCKED_AT_ONCE = 1 << 30


class HostPages:
    """Host memory of `nbytes` that the system takes back at `release`, at addresses that stay. What is read
    afterwards are zeros.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[:nbytes]

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes]."""
        return self._bytes

    def release(self) -> None:
        """Give the memory back."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """The system takes memory again at the next write."""


class Region:
    """`tensors`: one of each of `specs` (name -> shape, dtype), zeros at first.

    Between `release` and `restore` nothing may read or write them. Raises CapacityError where the device has too little
    memory left.
    """

    def __init__(self, specs: Specs, device: torch.device) -> None:
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in specs.values()]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        self._device = device
        self._pages = CudaPages(starts[-1], device) if device.type == "cuda" else HostPages(starts[-1])
        self._bytes = self._pages.tensor()
        self._bytes.zero_()
        self._kept: _HostCopy | None = None
        self.tensors: Mapping[str, torch.Tensor] = {
            name: self._bytes[first : first + size].view(dtype).view(shape)
            for (name, (shape, dtype)), first, size in zip(specs.items(), starts, sizes, strict=False)
        }

    def release(self, keep: bool) -> None:
        """Give the memory back; `keep`: its content goes to host memory, page-locked for a GPU. The device must be done
        with it.
        """
        self._kept = _HostCopy(self._bytes) if keep else None
        self._pages.release()

    def restore(self) -> None:
        """Take memory again, with what was kept of its content, else zeros."""
        self._pages.restore()
        if self._kept is None:
            self._bytes.zero_()
        else:
            self._bytes.copy_(self._kept.memory)
        self._kept = None


class _HostCopy:
    """A tensor's bytes in host memory."""

    def __init__(self, source: torch.Tensor) -> None:
        self.memory = host_bytes(source.numel())
        if source.device.type == "cuda":
            self.memory.zero_()  # the system finds all pages before they are locked
            pieces = self.memory.split(LOCKED_AT_ONCE)
            page_lock(self, pieces, contextlib.nullcontext(), remedy="free host memory, or use sleep(level=2)")
        self.memory.copy_(source)
