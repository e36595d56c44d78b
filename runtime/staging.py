"""Small arrays to the device in one copy: named fields packed into one buffer, filled on the host through numpy."""
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from .plan import AHEAD

ALIGNMENT = 16
NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class Staging:
    """Fields (name, shape, dtype) that travel together.

    `host[name]` are numpy arrays to write, `device[name]` the tensors that `upload` updates. On a GPU the host side is pinned and has a generation
    for each step that may be on its way, so that the next one's arrays are written while earlier copies are still to come: `host` changes at each `upload`.
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
            name: self._flat[first:first + nbytes].view(dtype).view(shape) for name, shape, dtype, first, nbytes in self._fields
        }
        self._host_flat = [torch.zeros(total, dtype=torch.uint8, pin_memory=True) for _ in range(AHEAD)] if on_gpu else [self._flat]
        self._hosts = [self._views(flat) for flat in self._host_flat]
        self._generation = 0

    def _views(self, flat: torch.Tensor) -> dict[str, Any]:
        array = flat.numpy()
        return {name: array[first:first + nbytes].view(NUMPY[dtype]).reshape(shape) for name, shape, dtype, first, nbytes in self._fields}

    @property
    def host(self) -> dict[str, Any]:
        """The arrays to write before the next `upload`."""
        return self._hosts[self._generation]

    def upload(self) -> None:
        """Send the host's arrays to the device, in stream order; on the CPU they are the same memory."""
        if len(self._hosts) > 1:
            self._flat.copy_(self._host_flat[self._generation], non_blocking=True)
            self._generation = (self._generation + 1) % len(self._hosts)
