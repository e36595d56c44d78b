"""Copy small arrays to the device in one transfer, and small tensors back to the host."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..scheduler.step_plan import AHEAD

ALIGNMENT = 16
CACHE_LINE = 128
PINNED_BYTES = 4 << 20
NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class Staging:
    """Fields (name, shape, dtype) packed into one buffer.

    Write the numpy arrays `host[name]`; `upload` updates the tensors `device[name]`. On a GPU there is a pinned buffer
    for each step that may be in flight, so `host` changes at each `upload`. The copy runs on its own stream during
    earlier steps, because between two steps it would delay the next one by 8 us.
    """

    def __init__(self, fields: Iterable[tuple[str, tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._fields: list[tuple[str, tuple[int, ...], torch.dtype, int, int]] = []
        total = 0
        for name, shape, dtype in fields:
            nbytes = int(np.prod(shape)) * dtype.itemsize
            self._fields.append((name, shape, dtype, total, nbytes))
            total += -(-nbytes // ALIGNMENT) * ALIGNMENT
        on_gpu = device.type == "cuda"
        self._flat = torch.zeros(total, dtype=torch.uint8, device=device)
        self.device: dict[str, torch.Tensor] = {
            name: self._flat[first : first + nbytes].view(dtype).view(shape)
            for name, shape, dtype, first, nbytes in self._fields
        }
        self._host_flat = [_PINNED.zeros(total) for _ in range(AHEAD)] if on_gpu else [self._flat]
        self._hosts = [self._views(flat) for flat in self._host_flat]
        self._current = 0
        self._transfers = [_Transfer(self._flat) for _ in self._host_flat] if on_gpu else []

    def _views(self, flat: torch.Tensor) -> dict[str, Any]:
        array = flat.numpy()
        return {
            name: array[first : first + nbytes].view(NUMPY[dtype]).reshape(shape)
            for name, shape, dtype, first, nbytes in self._fields
        }

    @property
    def host(self) -> dict[str, Any]:
        """The arrays to write before the next `upload`."""
        return self._hosts[self._current]

    def upload(self, rows: int | None = None) -> None:
        """Copy `host` to `device` in stream order; `rows`: number of the last field's rows to copy."""
        if self._transfers:
            count = len(self._flat)
            if rows is not None:
                _, shape, _, first, nbytes = self._fields[-1]
                count = first + nbytes // shape[0] * rows
            self._transfers[self._current].send(self._host_flat[self._current][:count], self._flat[:count])
            self._current = (self._current + 1) % len(self._hosts)


class _PinnedMemory:
    """Pinned host memory in large blocks, since an allocation takes a millisecond. Blocks live as long as tensors."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes], page-locked."""
        used = -(-nbytes // CACHE_LINE) * CACHE_LINE
        if used > len(self._free):
            self._free = torch.zeros(max(used, PINNED_BYTES), dtype=torch.uint8, pin_memory=True)
        found, self._free = self._free[:nbytes], self._free[used:]
        return found


_PINNED = _PinnedMemory()


class _Transfer:
    """Copies pinned memory to the device while earlier steps run, then in stream order to its target."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._buffer = torch.empty_like(flat)
        self._stream = copy_stream(flat.device, "in")
        self._arrived, self._consumed = torch.cuda.Event(), torch.cuda.Event()
        self._consumed.record(torch.cuda.current_stream(flat.device))  # after earlier uses of this memory

    def send(self, host: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy pinned `host` to `flat` of the same length, visible to later work on the current stream."""
        current = torch.cuda.current_stream(flat.device)
        with torch.cuda.stream(self._stream):
            self._consumed.wait(self._stream)
            buffer = self._buffer[: len(host)]
            buffer.copy_(host, non_blocking=True)
            self._arrived.record(self._stream)
        self._arrived.wait(current)
        flat.copy_(buffer)
        self._consumed.record(current)


@lru_cache(maxsize=16)
def copy_stream(device: torch.device, direction: str) -> Any:
    """Return the stream for small copies "in" to the device or "out" of it; the latter wait for a step's end."""
    return torch.cuda.Stream(device)


def to_host(
    tensors: Iterable[torch.Tensor], device: torch.device, persistent: bool = False
) -> tuple[list[torch.Tensor], Any]:
    """Copy a step's tensors to pinned memory, in order with the current stream. Returns the copies and the event after
    which they are valid; on the CPU the tensors themselves and None.

    persistent  the tensors are not freed, and their owner waits for the event before it writes to them
    """
    if device.type != "cuda":
        return list(tensors), None
    stream, ready, done = copy_stream(device, "out"), torch.cuda.Event(), torch.cuda.Event()
    ready.record(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # later steps do not wait for copies to the host
        ready.wait(stream)
        copies = [_to_pinned(tensor, None if persistent else stream) for tensor in tensors]
        done.record(stream)
    return copies, done


def _to_pinned(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """Copy to pinned memory on the current stream. `stream`: the current one, for a tensor of another stream: its
    memory must not be reused before the copy. None: the tensor is not freed.
    """
    if stream is not None:
        tensor.record_stream(stream)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
