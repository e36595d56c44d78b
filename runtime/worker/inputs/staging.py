"""Small arrays to the device in one copy: named fields packed into one buffer, filled on the host through numpy. And
small tensors back to the host.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...scheduler.step_plan import AHEAD

ALIGNMENT = 16
NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class Staging:
    """Fields (name, shape, dtype) that travel together.

    `host[name]` are numpy arrays to write, `device[name]` the tensors that `upload` updates. On a GPU the host side is
    pinned and has a generation for each step that may be on its way, so that the next one's arrays are written while
    earlier copies are still to come: `host` changes at each `upload`. They cross to the device on a stream of their
    own, while earlier steps run: between two steps a copy engine would cost 8 us.
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
        self._host_flat = (
            [torch.zeros(total, dtype=torch.uint8, pin_memory=True) for _ in range(AHEAD)] if on_gpu else [self._flat]
        )
        self._hosts = [self._views(flat) for flat in self._host_flat]
        self._generation = 0
        self._crossings = [_Crossing(self._flat) for _ in self._host_flat] if on_gpu else []

    def _views(self, flat: torch.Tensor) -> dict[str, Any]:
        array = flat.numpy()
        return {
            name: array[first : first + nbytes].view(NUMPY[dtype]).reshape(shape)
            for name, shape, dtype, first, nbytes in self._fields
        }

    @property
    def host(self) -> dict[str, Any]:
        """The arrays to write before the next `upload`."""
        return self._hosts[self._generation]

    def upload(self, rows: int | None = None) -> None:
        """Send the host's arrays to the device, in stream order; on the CPU they are the same memory. `rows`: so many
        of the last field's are enough.
        """
        if self._crossings:
            count = len(self._flat)
            if rows is not None:
                _, shape, _, first, nbytes = self._fields[-1]
                count = first + nbytes // shape[0] * rows
            self._crossings[self._generation].send(self._host_flat[self._generation][:count], self._flat[:count])
            self._generation = (self._generation + 1) % len(self._hosts)


class _Crossing:
    """One generation's way to the device: pinned memory -> `landed`, while earlier steps run, -> where the current
    stream's next step reads it.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._landed = torch.empty_like(flat)
        self._stream = copy_stream(flat.device, "in")
        self._arrived, self._taken = torch.cuda.Event(), torch.cuda.Event()
        self._taken.record(torch.cuda.current_stream(flat.device))  # what used this memory before is done with it

    def send(self, host: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy pinned `host` to `flat`, which is as long; work queued on the current stream from now on finds it."""
        current = torch.cuda.current_stream(flat.device)
        with torch.cuda.stream(self._stream):
            self._taken.wait(self._stream)
            landed = self._landed[: len(host)]
            landed.copy_(host, non_blocking=True)
            self._arrived.record(self._stream)
        self._arrived.wait(current)
        flat.copy_(landed)
        self._taken.record(current)


@lru_cache(maxsize=16)
def copy_stream(device: torch.device, direction: str) -> Any:
    """The stream on which small arrays travel, "in" to the device or "out" of it: one each, since what goes out
    waits for a step's end.
    """
    return torch.cuda.Stream(device)


def to_host(
    tensors: Iterable[torch.Tensor], device: torch.device, lasting: bool = False
) -> tuple[list[torch.Tensor], Any]:
    """Copies of a step's tensors in pinned memory, as they are after all that is queued on the current stream, and the
    event after which they are valid. On the CPU the tensors themselves, and None.

    lasting  nothing frees the tensors, and their owner waits for the event before it writes them again
    """
    if device.type != "cuda":
        return list(tensors), None
    stream, ready, done = copy_stream(device, "out"), torch.cuda.Event(), torch.cuda.Event()
    ready.record(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # what is queued next does not wait for what goes to the host
        ready.wait(stream)
        copies = [_to_pinned(tensor, None if lasting else stream) for tensor in tensors]
        done.record(stream)
    return copies, done


def _to_pinned(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """A copy in pinned memory, made on the current stream. `stream`: that, if the tensor is another's, whose allocator
    must not hand its memory on before; None: nothing frees it.
    """
    if stream is not None:
        tensor.record_stream(stream)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
