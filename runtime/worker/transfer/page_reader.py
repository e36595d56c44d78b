"""Loads KV pages of prefill engines from their memory into a decode engine's pages."""

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ....ops.core.cuda_driver import call_driver, cuda_driver
from ...scheduler.step_plan import PageCopies, StepPlan
from .page_copier import PageCopier, page_bytes
from .shared_memory import FINGERPRINT_BYTES, SharedMemory

REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly
READ_ONLY_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
OTHER_MODEL = "the other engine has another model, other options or is being started"
NOT_THERE = "the pages have been overwritten"


class _Load(NamedTuple):
    """A load in flight, and the entries of its pages before it."""

    memory: SharedMemory
    copies: PageCopies
    before: bytes


class PageReader:
    """Copies pages from the memories of `sources` (name -> path) to `stacks`, see `PageCopier`.

    A load fails, and reports why, unless all its pages were in the memory before and after it, with the expected keys.

    fingerprint  of this engine's model and format; pages of another one are not read

    Raises OSError if a memory cannot be mapped, MemoryError if it cannot be page-locked.
    """

    def __init__(self, stacks: list[torch.Tensor], device: torch.device, sources: Mapping[str, str]) -> None:
        self.page_bytes = page_bytes(stacks)
        self.fingerprint = bytes(FINGERPRINT_BYTES)
        read_only = device.type != "cuda" or _maps_read_only(device)
        flags = REGISTER_READ_ONLY if read_only else 0
        self._sources: dict[str, tuple[SharedMemory, PageCopier]] = {}
        for name, path in sources.items():
            memory = SharedMemory(path, self.page_bytes, writable=not read_only)
            copier = PageCopier(stacks, memory.num_pages, device, memory.pages, is_reader=True, lock_flags=flags)
            self._sources[name] = memory, copier
        self._loads: dict[int, _Load] = {}
        self._refused: list[tuple[int, str | None]] = []

    def start(self, copies: PageCopies) -> None:
        """Start loads after the steps launched so far; return at once. An error is reported by `finished`."""
        memory, copier = self._sources.get(copies.source, (None, None))
        if memory is None or copier is None:
            self._refused.append((copies.ticket, f"there is no engine with the memory {copies.source!r}"))
            return
        if memory.fingerprint != self.fingerprint or not any(self.fingerprint):
            self._refused.append((copies.ticket, OTHER_MODEL))
            return
        before = memory.entries((place for place, _ in copies.loads), copies.keys)
        if before is None:
            self._refused.append((copies.ticket, NOT_THERE))
            return
        self._loads[copies.ticket] = _Load(memory, copies, before)
        copier.start(copies)

    def before_step(self, plan: StepPlan) -> None:
        """Do nothing: no step uses a page that is being loaded, and there are no saves."""

    def finished(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        """See `PageCopier.finished`."""
        ended, self._refused = self._refused, []
        for _, copier in self._sources.values():
            for ticket, problem in copier.finished(0.0 if ended else timeout / len(self._sources)):
                load = self._loads.pop(ticket)
                places = (place for place, _ in load.copies.loads)
                if problem is None and load.memory.entries(places, load.copies.keys) != load.before:
                    problem = NOT_THERE
                ended.append((ticket, problem))
        return ended


def _maps_read_only(device: torch.device) -> bool:
    """Return whether a GPU can read memory that this process cannot write."""
    value = ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    call_driver(cuda_driver(), "cuDeviceGetAttribute", ctypes.byref(value), READ_ONLY_SUPPORTED, index)
    return bool(value.value)
