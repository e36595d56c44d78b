"""Copies KV pages to page-locked host memory and back while steps run. `scheduler.host_pages` has the directory."""

import contextlib
import ctypes
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....ops.core.cuda_driver import call_driver, cuda_driver
from ...adapters.host_memory import block_offsets, host_bytes, page_lock
from ...scheduler.failed_steps import written_pages
from ...scheduler.step_plan import PageCopies, StepPlan
from ..disk.page_files import PageFiles
from ..memory_budget import Specs

LOCK_BYTES = 1 << 30
POLL_SECONDS = 0.0002
HOST, DEVICE = 1, 2  # CU_MEMORYTYPE_HOST and _DEVICE
_log = logging.getLogger(__name__)


def stacked_specs(caches: Specs) -> Specs:
    """Return the specs of the caches of all layers (name -> [pages, ...]) as one [L, pages, ...] for each kind.

    Then one copy moves a page of all layers.
    """
    kinds: dict[Any, list[str]] = {}
    for name, spec in caches.items():
        kinds.setdefault(spec, []).append(name)
    return {names[0]: ((len(names), *shape), dtype) for (shape, dtype), names in kinds.items()}


def unstacked(caches: Specs, stacks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the cache of each layer as a view of tensors of `stacked_specs`."""
    layers = {spec: iter(stacks[name]) for name, spec in caches.items() if name in stacks}
    return {name: next(layers[spec]) for name, spec in caches.items()}


def page_bytes(stacks: list[torch.Tensor]) -> int:
    """Return the bytes of a page of all `stacks` in host memory."""
    return block_offsets(_sizes(stacks))[-1]


def _sizes(stacks: list[torch.Tensor]) -> list[int]:
    return [stack[:, 0].nbytes for stack in stacks]


@dataclass
class _InFlight:
    """Copies that have started: the pages that their saves read and write, the host pages that their loads read, and
    the events at their ends.
    """

    ticket: int
    saved: set[int]
    written: set[int]
    read: set[int]
    after_saves: Any = None
    end: Any = None


class PageCopier:
    """Copies pages between `stacks` (see `stacked_specs`) and `num_pages` pages of host memory, `pages` (uint8).

    Orders for files are passed to `files`, which reads and writes `pages`, after copies of the same host pages.

    On a GPU saves and loads have a stream each. Both wait for the steps that were launched before. Loads wait for saves
    of the pages that they write and read, saves for loads that read their host pages, and a step for saves of pages
    that it writes (`before_step`).

    memory      uint8 [num_pages * `page_bytes`] in place of memory of its own, for example of another process
    is_reader   it makes loads only, so that `memory` keeps its content
    lock_flags  of cudaHostRegister

    Raises MemoryError if the host memory cannot be page-locked.
    """

    def __init__(
        self,
        stacks: list[torch.Tensor],
        num_pages: int,
        device: torch.device,
        memory: torch.Tensor | None = None,
        is_reader: bool = False,
        lock_flags: int = 0,
    ) -> None:
        self._device = device
        self._stacks = [stack.view(torch.uint8).flatten(2) for stack in stacks]  # [L, pages, bytes]
        sizes = _sizes(stacks)
        *offsets, size = block_offsets(sizes)
        memory = host_bytes(num_pages * size) if memory is None else memory
        self.pages = memory.view(num_pages, size)
        self.files: PageFiles | None = None
        self._file_orders: list[PageCopies] = []
        self._host = [
            self.pages[:, first : first + count].unflatten(1, (len(stack), -1))
            for first, count, stack in zip(offsets, sizes, self._stacks, strict=True)
        ]
        self._in_flight: deque[_InFlight] = deque()
        self._finished: list[tuple[int, str | None]] = []
        if device.type == "cuda":
            if not is_reader:
                memory.zero_()  # allocates all pages before they are locked
            chunks = memory.split(max(1, LOCK_BYTES // size) * size)  # a copy must not cross two of them
            page_lock(self, chunks, contextlib.nullcontext(), remedy="lower kv_host_gb", flags=lock_flags)
            self._save_stream, self._load_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
            kinds = list(zip(self._host, self._stacks, strict=True))
            self._to_host = [_prepare(host, stack, to_host=True) for host, stack in kinds]
            self._to_device = [_prepare(host, stack, to_host=False) for host, stack in kinds]

    def start(self, copies: PageCopies) -> None:
        """Start copies after the steps launched so far; return at once. An error is reported by `finished`."""
        if copies.file is not None:
            self._file_orders.append(copies)
            self._start_file_orders()
            return
        try:
            if self._device.type == "cuda":
                self._enqueue(copies)
                return
            for page, place in copies.saves:
                for host, stack in zip(self._host, self._stacks, strict=True):
                    host[place].copy_(stack[:, page])
            for place, page in copies.loads:
                for host, stack in zip(self._host, self._stacks, strict=True):
                    stack[:, page].copy_(host[place])
            problem = None
        except Exception as error:
            _log.exception("KV pages could not be copied")
            problem = str(error) or type(error).__name__
            if self._device.type == "cuda":  # copies that have started end before their pages are used again
                for stream in (self._save_stream, self._load_stream):
                    torch.cuda.current_stream(self._device).wait_stream(stream)
        self._finished.append((copies.ticket, problem))

    def _start_file_orders(self) -> None:
        """Start the orders whose pages are not being copied. `scheduler.disk` starts no copies of pages of orders."""
        if self.files is None:
            raise RuntimeError("KV pages have files, but the engine was started without kv_disk")
        copied = set().union(*(each.written | each.read for each in self._in_flight))
        waiting = []
        for copies in self._file_orders:
            if copies.file is not None and copies.file.place in copied:
                waiting.append(copies)
            else:
                self.files.start(copies)
        self._file_orders = waiting

    def _enqueue(self, copies: PageCopies) -> None:
        steps, saving, loading = torch.cuda.current_stream(self._device), self._save_stream, self._load_stream
        found = _InFlight(
            copies.ticket,
            {page for page, _ in copies.saves},
            {place for _, place in copies.saves},
            {place for place, _ in copies.loads},
        )
        targets = {page for _, page in copies.loads}
        self._check(found.saved | targets, self._stacks[0].shape[1])
        self._check(found.written | found.read, self._host[0].shape[0])
        found.end = found.after_saves = torch.cuda.Event()
        if copies.saves:
            saving.wait_stream(steps)
            for earlier in self._in_flight:
                if not found.written.isdisjoint(earlier.read):
                    saving.wait_event(earlier.end)
            for page, place in copies.saves:
                self._copy(self._to_host, page, place, saving)
            found.after_saves.record(saving)
        if copies.loads:
            loading.wait_stream(steps)
            for each in (*self._in_flight, found):
                if not (found.read.isdisjoint(each.written) and targets.isdisjoint(each.saved)):
                    loading.wait_event(each.after_saves)
            for place, page in copies.loads:
                self._copy(self._to_device, page, place, loading)
            found.end = torch.cuda.Event()
            found.end.record(loading)
        self._in_flight.append(found)

    @staticmethod
    def _check(pages: set[int], count: int) -> None:
        """Raise IndexError unless all pages are among `count`: the driver does not check the addresses of a copy."""
        if pages and not 0 <= min(pages) <= max(pages) < count:
            raise IndexError(f"there is no page {max(pages) if max(pages) >= count else min(pages)} of {count}")

    def _copy(self, kinds: "list[_PageCopy]", page: int, place: int, stream: Any) -> None:
        """Enqueue the copies of one page."""
        driver, handle = cuda_driver(), ctypes.c_void_p(stream.cuda_stream)
        for kind in kinds:
            kind.device.y = page
            kind.memory.host = kind.start + place * kind.stride
            call_driver(driver, "cuMemcpy3DAsync_v2", ctypes.byref(kind.copy), handle)

    def before_step(self, plan: StepPlan) -> None:
        """Make the device's current stream wait for saves of pages that a step writes."""
        if not any(copies.saved for copies in self._in_flight):
            return
        pages = written_pages(plan)
        for copies in self._in_flight:
            if not pages.isdisjoint(copies.saved):
                torch.cuda.current_stream(self._device).wait_event(copies.after_saves)

    def finished(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        """Return (ticket, error or None) of copies that ended since the last call. Wait up to `timeout` seconds for the
        first.
        """
        until = time.monotonic() + timeout
        while True:
            for copies in tuple(self._in_flight):
                if copies.after_saves.query() and copies.end.query():
                    self._in_flight.remove(copies)
                    self._finished.append((copies.ticket, None))
            if self._file_orders:
                self._start_file_orders()
            if self.files is not None:
                self._finished += self.files.finished()
            if self._finished or time.monotonic() >= until:
                finished, self._finished = self._finished, []
                return finished
            time.sleep(POLL_SECONDS)


class _Side(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("x_in_bytes", "y", "z", "lod")),
        ("memory_type", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("host", "device", "array", "reserved")),
        *((name, ctypes.c_size_t) for name in ("pitch", "height")),
    )


class _Copy3D(ctypes.Structure):  # CUDA_MEMCPY3D: address = start + (z * height + y) * pitch + x
    _fields_ = (
        ("source", _Side),
        ("target", _Side),
        *((name, ctypes.c_size_t) for name in ("width_in_bytes", "height", "depth")),
    )


@dataclass
class _PageCopy:
    """A prepared copy, its two sides, and the address of the first host page and bytes between two."""

    copy: _Copy3D
    device: _Side
    memory: _Side
    start: int
    stride: int


def _prepare(host: torch.Tensor, stack: torch.Tensor, to_host: bool) -> _PageCopy:
    """Return the copy of a page of one kind of cache, a row in every layer. torch's own copy would first gather the
    rows in a buffer.
    """
    layers, num_pages, row = stack.shape
    copy = _Copy3D(width_in_bytes=row, height=1, depth=layers)
    device, memory = (copy.source, copy.target) if to_host else (copy.target, copy.source)
    device.memory_type, device.device, device.pitch, device.height = DEVICE, stack.data_ptr(), row, num_pages
    memory.memory_type, memory.pitch, memory.height = HOST, row, 1
    return _PageCopy(copy, device, memory, host.data_ptr(), host.stride(0))
