"""Load adapters into GPU slots while steps run: disk -> host memory -> slot. One thread reads, one copies."""

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...compiler.graph.recipe import Recipe
from ...graphs.adapter_config import AdapterError
from ...graphs.lora import LoraShape
from ..processes.threads import start_thread
from ..scheduler.step_plan import SLOT_DAMAGED
from .background_jobs import stop_threads
from .base_weights import BaseWeights
from .host_memory import CHUNK_BYTES, Block, block_offsets, host_bytes
from .host_store import HostStore
from .packing import limit_torch_threads
from .registry import AdapterRegistry
from .slot_audit import page_sums, start_audit

STOP_SECONDS = 30.0
POLL_SECONDS = 0.0002
LEAD_SECONDS = 0.001
LONGEST_LEAD = 0.005
LEAD_SHARE = 0.75
STEPS_WATCHED = 8
WIDE_BYTES = 8  # of an element of the scatter copy, where every tensor is aligned
_log = logging.getLogger(__name__)
LoadReport = tuple[int, int, str | None]  # slot, adapter, error
Copy = tuple[int, int, Block]
Read = tuple[int, int, int | None, int]  # priority, serial number, slot (None: not reported), adapter
STOP_READING: Read = (-1, -1, None, -1)


class SlotCopier:
    """Copies blocks into slots with a few large copies and launches.

    A block is copied into a buffer on the device and scattered from there. A copy for each of its thousand tensors
    would take longer than the transfer over the bus.

    slots   slots[s]: the tensors of slot s on the device, in a block's order
    """

    def __init__(self, slots: Sequence[list[torch.Tensor]], device: torch.device) -> None:
        self._slots = slots
        self._buffer: torch.Tensor | None = None
        if device.type != "cuda" or not slots:
            return
        sizes = [tensor.nbytes for tensor in slots[0]]
        offsets = block_offsets(sizes)
        self._buffer = torch.empty(offsets[-1], dtype=torch.uint8, device=device)
        wide = not any(size % WIDE_BYTES for size in sizes) and not any(
            tensor.data_ptr() % WIDE_BYTES for slot in slots for tensor in slot
        )
        dtype = torch.int64 if wide else torch.uint8
        self._sources = [
            self._buffer[first : first + size].view(dtype) for first, size in zip(offsets, sizes, strict=False)
        ]
        self._targets = [[tensor.view(-1).view(torch.uint8).view(dtype) for tensor in slot] for slot in slots]

    def enqueue(self, slot: int, block: Block) -> None:
        """Enqueue a copy on the current stream, one at a time; return at once for a page-locked block."""
        if self._buffer is None:
            torch._foreach_copy_(self._slots[slot], block.tensors)
            return
        for source, target in zip(block.memory.split(CHUNK_BYTES), self._buffer.split(CHUNK_BYTES), strict=True):
            target.copy_(source, non_blocking=True)
        torch._foreach_copy_(self._targets[slot], self._sources)

    def sums(self, slot: int) -> torch.Tensor:
        """Return `page_sums` of a slot that has received a block, computed on the current stream, on the CPU."""
        if self._buffer is not None:
            torch._foreach_copy_(self._sources, self._targets[slot])
            return page_sums(self._buffer).cpu()
        parts = [tensor.view(-1).view(torch.uint8) for tensor in self._slots[slot]]
        offsets = block_offsets([part.numel() for part in parts])
        memory = host_bytes(offsets[-1])
        for first, part in zip(offsets, parts, strict=False):
            memory[first : first + part.numel()] = part
        return page_sums(memory)


@dataclass
class InFlightCopy:
    """A running copy: its first and last event, and its expected end `due` (time.monotonic)."""

    slot: int
    number: int
    block: Block
    first: Any
    last: Any
    due: float | None
    reported: bool = False


class SlotLoader:
    """The stacks [S, ...] on the device, and the threads that load adapters into them.

    `start_load` starts a copy into a slot that no running step reads, and `finished_loads` reports its end. Until then
    the caller must not schedule a step with the slot. A copy is reported shortly before its end, so that the next step
    can already be planned with it; `before_step` then makes the device wait for the end of the copy.

    Hold `device_calls` during the capture of a CUDA graph: no other thread may call the device then.
    """

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        stacks: Mapping[str, torch.Tensor],
        registry: AdapterRegistry,
        lora: LoraShape,
        max_cpu_adapters: int,
        constants: Mapping[str, torch.Tensor] = MappingProxyType({}),
        base: BaseWeights | None = None,
    ) -> None:
        self.stacks = dict(stacks)
        self._with_parts = np.zeros(lora.slots, bool)
        self._numbers = np.full(lora.slots, -1, np.int32)  # the adapter in each slot, -1: none, or not loaded yet
        # adapter and block of the last copy into each slot, under device_calls; a block read again may be rounded anew
        self._copied: dict[int, tuple[int, weakref.ref[Block]]] = {}
        self.lora = lora
        self.device_calls = threading.Lock()
        self.store = HostStore(recipes, stacks, registry, lora, max_cpu_adapters, self.device_calls, constants, base)
        self.lead_seconds = LEAD_SECONDS
        self._registry = registry
        self._device = next(iter(stacks.values())).device
        slots = [[stacks[name][slot] for name in recipes] for slot in range(lora.slots)]
        self._copier = SlotCopier(slots, self._device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._reads: queue.PriorityQueue[Read] = queue.PriorityQueue()
        self._copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._in_flight: deque[InFlightCopy] = deque()
        self._copy_seconds: float | None = None
        self._step_ends: deque[float] = deque(maxlen=STEPS_WATCHED)
        self._busy_until = 0.0
        self._finished: deque[LoadReport] = deque()
        self._serial = count()
        self._started = False

    def start_load(self, slot: int, number: int) -> None:
        """Start loading an adapter into a slot, or with slot -1 into host memory only; return at once."""
        self._start_threads()
        self._set_parts(slot, number)
        if slot >= 0:
            self._numbers[slot] = -1
        block = self.store.acquire(number) if slot >= 0 else None
        if block is not None:
            self._copies.put((slot, number, block))
        else:
            self._reads.put((slot < 0, next(self._serial), slot, number))

    def has_parts(self, slots: NDArray[np.int32]) -> bool:
        """Return whether one of the adapters in `slots` (-1: none) has parts besides LoRA."""
        return self.lora.varies and bool(self._with_parts[slots[slots >= 0]].any())

    def _set_parts(self, slot: int, number: int) -> None:
        """Store whether the adapter has parts. No running step reads the slot, see `start_load`."""
        if slot >= 0 and self.lora.varies and self._registry.is_in_use(number):  # else its load fails
            self._with_parts[slot] = self._registry.by_number(number).adapter.needs_parts

    def prefetch_later(self, numbers: list[int]) -> None:
        """Load adapters into host memory when no other read is queued, without a report."""
        self._start_threads()
        for number in numbers:
            self._reads.put((2, next(self._serial), None, number))

    def prefetch(self, numbers: list[int]) -> None:
        """Load adapters into host memory. Raises AdapterError or OSError."""
        for number in numbers:
            self.store.release(self.store.prepare(number))

    def finished_loads(self, timeout: float = 0.0) -> list[LoadReport]:
        """Return new reports of ended loads. Wait up to `timeout` seconds for the first."""
        until = time.monotonic() + timeout
        while True:
            self._poll_copies()
            if self._finished or time.monotonic() >= until:
                reports = [self._finished.popleft() for _ in range(len(self._finished))]
                for slot, number, error in reports:
                    if slot >= 0 and error is None:
                        self._numbers[slot] = number
                return reports
            time.sleep(POLL_SECONDS)

    def check_slots(self, slots: NDArray[np.int32], numbers: NDArray[np.int32]) -> None:
        """Raise RuntimeError unless each of `slots` (-1: none) holds the adapter in `numbers`.

        The scheduler never lets another adapter into a slot that is in use. A fault there must fail requests instead of
        answering them with another one's adapter.
        """
        wrong = np.flatnonzero((slots >= 0) & (self._numbers[slots] != numbers))
        if len(wrong):
            slot, number = int(slots[wrong[0]]), int(numbers[wrong[0]])
            raise RuntimeError(f"adapter slot {slot} holds adapter {self._numbers[slot]}, but the step needs {number}")

    def audit(self, slot: int) -> bool:
        """Compare a slot with the block that it was copied from; return whether that is still in host memory.

        `finished_loads` reports a difference as SLOT_DAMAGED. Steps run meanwhile.
        """
        copied = self._copied.get(slot)
        block = None if copied is None else self.store.acquire(copied[0])
        if copied is None or block is None:
            return False
        number, source = copied
        try:
            if source() is not block:
                return False
            expected = page_sums(block.memory)
            with self.device_calls, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                if self._copied.get(slot) is copied and not torch.equal(self._copier.sums(slot), expected):
                    del self._copied[slot]
                    self._finished.append((slot, number, SLOT_DAMAGED))
                    _log.error("adapter slot %d differs from its adapter in host memory", slot)
        finally:
            self.store.release(block)
        return True

    def forget_slots(self) -> None:
        """Forget which adapters the slots hold, before their memory is released. No step and no copy may run."""
        with self.device_calls:
            self._copied.clear()
        self._numbers.fill(-1)

    def before_step(self, slots: NDArray[np.int32]) -> None:
        """Make the device's current stream wait for copies into `slots` that were reported before their end."""
        for copy in tuple(self._in_flight):
            if copy.reported and (slots == copy.slot).any():
                torch.cuda.current_stream(self._device).wait_event(copy.last)

    def record_step_end(self, now: float) -> None:
        """Update `lead_seconds` when a step has ended at `now` (time.monotonic).

        When a step ends, the next one starts, and the one after it is planned. A copy that ends within the time of one
        step therefore delays nothing. `lead_seconds` is a share of the shortest recent step time.
        """
        ends = self._step_ends
        ends.append(now)
        if len(ends) == STEPS_WATCHED:
            shortest = min(later - earlier for earlier, later in pairwise(ends))
            self.lead_seconds = min(max(LEAD_SHARE * shortest, LEAD_SECONDS), LONGEST_LEAD)

    def _poll_copies(self) -> None:
        now = time.monotonic()
        for copy in tuple(self._in_flight):  # they end in order
            ended = copy.last.query()
            if not copy.reported and (ended or (copy.due is not None and now >= copy.due - self.lead_seconds)):
                copy.reported = True
                self._finished.append((copy.slot, copy.number, None))
            if ended:
                self._copy_seconds = copy.first.elapsed_time(copy.last) / 1e3
                self._in_flight.popleft()
                self.store.release(copy.block)

    def load(self, slot: int, number: int) -> None:
        """Load an adapter into a slot after the current stream's work, and wait for it."""
        block = self.store.acquire(number)
        if block is None:  # else a step would wait while another adapter is packed
            block = self.store.prepare(number)
        self._set_parts(slot, number)
        self._numbers[slot] = -1
        if self._stream is None:
            self._enqueue(slot, number, block)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with self.device_calls, torch.cuda.stream(self._stream):
                self._enqueue(slot, number, block)
            self._stream.synchronize()
        self._numbers[slot] = number
        self.store.release(block)

    def _enqueue(self, slot: int, number: int, block: Block) -> None:
        self._copied.pop(slot, None)
        self._copier.enqueue(slot, block)
        self._copied[slot] = number, weakref.ref(block)

    def drop(self, number: int) -> None:
        """Free an adapter that is no longer used."""
        self._registry.drop(number)  # first, so that a concurrent read stores nothing
        self._numbers[self._numbers == number] = -1
        self.store.drop(number)

    def _start_threads(self) -> None:
        if self._started:
            return
        self._started = True
        owner = weakref.ref(self)  # the threads must not keep the loader alive
        stop, on_gpu = partial(_stop, self._reads, self._copies), self._device.type == "cuda"
        threads = [
            start_thread(_run, owner, name, jobs, on_gpu, name=f"adapter{name}", stop=stop)
            for name, jobs in (("_read", self._reads), ("_copy", self._copies))
        ]
        weakref.finalize(self, stop_threads, stop, threads, STOP_SECONDS).atexit = False
        stopped = threading.Event()
        weakref.finalize(self, stop_threads, stopped.set, [start_audit(self, stopped)], STOP_SECONDS).atexit = False

    def _read(self, job: Read) -> None:
        *_, slot, number = job
        try:
            block = self.store.prepare(number)
        except Exception as error:
            if slot is not None:
                self._finished.append((slot, number, self._error_text(number, error)))
            return
        if slot is not None and slot >= 0:
            self._copies.put((slot, number, block))
            return
        self.store.release(block)
        if slot is not None:
            self._finished.append((slot, number, None))

    def _copy(self, job: Copy) -> None:
        slot, number, block = job
        try:
            if self._stream is not None:
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin = max(time.monotonic(), self._busy_until)
                with self.device_calls, torch.cuda.stream(self._stream):
                    first.record(self._stream)
                    self._enqueue(slot, number, block)
                    last.record(self._stream)
                due = None if self._copy_seconds is None else begin + self._copy_seconds
                self._busy_until = begin if due is None else due
                self._in_flight.append(InFlightCopy(slot, number, block, first, last, due))
                return
            with self.device_calls:
                self._enqueue(slot, number, block)
            error_text = None
        except Exception as error:
            error_text = self._error_text(number, error)
        self.store.release(block)
        self._finished.append((slot, number, error_text))

    def _error_text(self, number: int, error: Exception) -> str:
        """Return an error for the user, without paths of this machine."""
        try:
            adapter = self._registry.by_number(number)
        except KeyError:
            return "the adapter was removed"
        prefix = f"adapter {adapter.name!r} could not be loaded: "
        if isinstance(error, AdapterError):
            return prefix + str(error).replace(str(adapter.path), repr(adapter.name))
        if isinstance(error, OSError):
            return prefix + (error.strerror or "its files cannot be read")
        if isinstance(error, RuntimeError) and "interpreter shutdown" in str(error):  # of the pool that reads files
            return prefix + "the interpreter exits"
        _log.error("adapter %r could not be loaded", adapter.name, exc_info=error)
        return prefix + "a fault in the engine, see its log"


def _run(owner: "weakref.ref[SlotLoader]", name: str, jobs: Any, on_gpu: bool) -> None:
    """Run a thread's loop: call method `name` for each job until a stop marker or the loader's end."""
    if on_gpu:
        limit_torch_threads()
    while (job := jobs.get()) not in (None, STOP_READING):
        loader = owner()
        if loader is None:
            return
        getattr(loader, name)(job)
        del loader, job


def _stop(reads: "queue.PriorityQueue[Read]", copies: "queue.SimpleQueue[Copy | None]") -> None:
    reads.put(STOP_READING)
    copies.put(None)
