"""Page-locked host memory from which a GPU copies asynchronously, and an adapter's block of it."""

import math
import mmap
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch

ALIGNMENT = 4096
"""A page of the operating system: page-locking one tensor must not touch its neighbours."""
LOCK_PAUSE = 0.0002
CHUNK_BYTES = 1 << 20
"""Bytes per page-locking call and per copy. No step can be launched during a call that locks pages."""


def host_bytes(count: int) -> torch.Tensor:
    """Return page-aligned uint8 [count], in huge pages if possible: they are locked hundreds of times faster."""
    memory = mmap.mmap(-1, max(1, count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:count]


def page_lock(
    owner: Any, chunks: Sequence[torch.Tensor], device_calls: Any, *, pause: float = 0.0, remedy: str, flags: int = 0
) -> None:
    """Page-lock uint8 tensors of `host_bytes` for the lifetime of `owner`. torch's pinned allocator would round up to
    powers of two.

    device_calls   context manager held during each chunk's call
    pause          seconds after each chunk, in which steps are launched
    flags          of cudaHostRegister

    Write to the memory first; otherwise the call also has to allocate its pages. Raises MemoryError, which ends with
    `remedy`.
    """
    runtime = torch.cuda.cudart()
    for chunk in chunks:
        pointer = chunk.data_ptr()
        with device_calls:
            error = int(runtime.cudaHostRegister(pointer, chunk.nbytes, flags))
        if error:
            total = sum(each.nbytes for each in chunks)
            raise MemoryError(
                f"{total / 2**20:.0f} MiB of host memory could not be page-locked (CUDA error {error}); {remedy}"
            )
        weakref.finalize(owner, runtime.cudaHostUnregister, pointer).atexit = False
        if pause:
            time.sleep(pause)


def block_offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of tensors of these bytes in a block, and the block's size."""
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


class Block:
    """One adapter's slot of every stack, in their order: `tensors` and `bytes` (numpy) are views of `memory`."""

    def __init__(self, shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        offsets = block_offsets(sizes)
        self.memory = host_bytes(offsets[-1])
        self.bytes = self.memory.numpy()
        self._offsets = offsets
        self.tensors = [
            self.memory[first : first + size].view(dtype).view(shape)
            for first, size, (shape, dtype) in zip(offsets, sizes, shapes, strict=False)
        ]
        self.num_users = 0
        self.locked = False

    def fill(self, indices: Sequence[int], values: torch.Tensor) -> None:
        """Copy values [len(indices), ...] to tensors, asynchronously from a GPU. No copy crosses CHUNK_BYTES, which may
        have been page-locked alone.
        """
        values = values.to(self.tensors[indices[0]].dtype).contiguous()
        targets, sources = [], []
        for index, source in zip(indices, values.view(len(indices), -1).view(torch.uint8), strict=True):
            place = first = self._offsets[index]
            end = first + source.numel()
            while place < end:
                upto = min(end, place - place % CHUNK_BYTES + CHUNK_BYTES)
                targets.append(self.memory[place:upto])
                sources.append(source[place - first : upto - first])
                place = upto
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def page_lock(self, device_calls: Any, steps_running: bool) -> None:
        """Page-lock the block. While steps run, lock it in chunks with pauses, since it takes tens of milliseconds."""
        chunks = self.memory.split(CHUNK_BYTES if steps_running else self.memory.numel())
        pause = LOCK_PAUSE if steps_running else 0.0
        page_lock(self, chunks, device_calls, pause=pause, remedy="lower max_cpu_loras")
        self.locked = True
