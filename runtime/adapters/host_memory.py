"""Host memory from which a GPU copies by itself: in huge pages, and page-locked in place."""

import mmap
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch


def host_bytes(count: int) -> torch.Tensor:
    """uint8 [count] that begins at a page; in huge pages where the system has them, which are found and locked
    hundreds of times faster.
    """
    memory = mmap.mmap(-1, max(1, count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:count]


def page_lock(
    owner: Any, pieces: Sequence[torch.Tensor], device_calls: Any, *, pause: float = 0.0, remedy: str
) -> None:
    """Page-lock uint8 tensors of `host_bytes`, until `owner`, which holds them, goes: the allocator for page-locked
    tensors rounds up to powers of two, half as much again for a typical adapter.

    device_calls   held during each piece's call
    pause          seconds after each piece, in which steps are launched
    The memory should have been written before, or the call also has to find and clear its pages. Raises MemoryError,
    whose text ends with `remedy`.
    """
    runtime = torch.cuda.cudart()
    for piece in pieces:
        pointer = piece.data_ptr()
        with device_calls:
            error = int(runtime.cudaHostRegister(pointer, piece.nbytes, 0))
        if error:
            total = sum(each.nbytes for each in pieces)
            raise MemoryError(
                f"{total / 2**20:.0f} MiB of host memory could not be page-locked (CUDA error {error}); {remedy}"
            )
        weakref.finalize(owner, runtime.cudaHostUnregister, pointer).atexit = False
        if pause:
            time.sleep(pause)
