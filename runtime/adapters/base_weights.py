"""The base's weights in its checkpoint, on which parts of adapters depend: norms of DoRA, trained biases."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...graphs.adapter import Adapter
from ...graphs.lora_stacks import Lookup, resolved


class BaseWeights:
    """The checkpoint in `directory` (None: random weights of `seed`), opened by `open_lookup` at the first use.

    `device` computes the norms, on a stream of its own.
    """

    def __init__(
        self, directory: Path | None, open_lookup: Callable[[], Lookup], device: torch.device, seed: int
    ) -> None:
        self._directory, self._open, self._device, self._seed = directory, open_lookup, device, seed

    @cached_property
    def stamp(self) -> str:
        """A hash that changes with the files' paths, sizes and times, or with the random weights."""
        found: list[Any] = [self._seed, self._device.type]
        if self._directory is not None:
            for path in sorted(self._directory.glob("*.safetensors")):
                state = path.stat()
                found.append((str(path.resolve()), state.st_ino, state.st_size, state.st_mtime_ns))
        return hashlib.sha256(repr(found).encode()).hexdigest()

    @cached_property
    def _lookup(self) -> Lookup:
        return self._open()

    def resolved(self, adapter: Adapter, device_calls: AbstractContextManager[Any]) -> Adapter:
        """Return `lora_stacks.resolved`. Hold `device_calls` while the device is called."""
        if not adapter.parts:
            return adapter
        if self._device.type != "cuda":
            return resolved(adapter, self._lookup, self._device, nullcontext())
        with device_calls:
            stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            return resolved(adapter, self._lookup, self._device, device_calls)
