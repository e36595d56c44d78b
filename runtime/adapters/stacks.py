"""The adapters' way into the device's stacks, while steps run: disk -> host memory -> slot, each on a thread of its
own.
"""

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
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
from .packing import use_few_threads
from .registry import AdapterRegistry
from .slot_copy import SlotCopies
from .store import AdapterStore, Block

STOP_SECONDS = 30.0
POLL_SECONDS = 0.0002
LEAD_SECONDS = 0.001
LONGEST_LEAD = 0.005
LEAD_SHARE = 0.75
STEPS_WATCHED = 8
_log = logging.getLogger(__name__)
Report = tuple[int, int, str | None]
Copy = tuple[int, int, Block]
Read = tuple[int, int, int | None, int]  # rank, serial number, slot (None: no report is wanted), adapter
NO_READ: Read = (-1, -1, None, -1)


@dataclass
class Flight:
    """A copy that the device works on: its first and last event, and when its end is expected (time.monotonic; None:
    not known).
    """

    slot: int
    number: int
    block: Block
    first: Any
    last: Any
    due: float | None
    told: bool = False


class AdapterStacks:
    """The stacks [S, ...] on the device, and what brings adapters into them.

    `start` begins a copy into a slot that no step at work reads, `finished` tells which copies have ended; the caller
    lets no step use the slot in between. A copy from host memory is a run of asynchronous copies on a stream of its own
    (`slot_copy`). One that is about to end is told early, so that the next step can be planned with it: the
    thread that launches a step calls `before_step` first, which has the device wait for what has not quite arrived.
    `device_calls` must be held while a CUDA graph is captured: other threads must not call the device meanwhile.
    """

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        stacks: Mapping[str, torch.Tensor],
        registry: AdapterRegistry,
        lora: LoraShape,
        keep: int,
        constants: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.stacks = dict(stacks)
        self.lora = lora
        self.device_calls = threading.Lock()
        self.store = AdapterStore(recipes, stacks, registry, lora, keep, self.device_calls, constants)
        self._registry = registry
        self._device = next(iter(stacks.values())).device
        self._copies_into = SlotCopies(
            [[stacks[name][slot] for name in recipes] for slot in range(lora.slots)], self._device
        )
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._reads: queue.PriorityQueue[Read] = queue.PriorityQueue()
        self._copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._flying: deque[Flight] = deque()
        self._copy_seconds: float | None = None
        self.lead_seconds = LEAD_SECONDS
        self._step_times: deque[float] = deque(maxlen=STEPS_WATCHED)
        self._busy_until = 0.0
        self._ended: deque[Report] = deque()
        self._serial = count()
        self._started = False

    def start(self, slot: int, number: int) -> None:
        """Begin to bring an adapter into a slot; slot -1: into host memory only. Returns at once."""
        self._start_threads()
        block = self.store.use(number) if slot >= 0 else None
        if block is not None:
            self._copies.put((slot, number, block))
        else:
            self._reads.put((slot < 0, next(self._serial), slot, number))

    def fill(self, numbers: list[int]) -> None:
        """Bring adapters into host memory when there is nothing else to read; `finished` does not report them."""
        self._start_threads()
        for number in numbers:
            self._reads.put((2, next(self._serial), None, number))

    def prefetch(self, numbers: list[int]) -> None:
        """The same, and wait for it. Raises AdapterError or OSError."""
        for number in numbers:
            self.store.release(self.store.prepare(number))

    def finished(self, timeout: float = 0.0) -> list[Report]:
        """(slot, number, None or what went wrong) of each `start` that has ended since the last call; waits up to
        `timeout` seconds for the first.
        """
        until = time.monotonic() + timeout
        while True:
            self._look_at_flights()
            if self._ended or time.monotonic() >= until:
                return [self._ended.popleft() for _ in range(len(self._ended))]
            time.sleep(POLL_SECONDS)

    def before_step(self, slots: NDArray[np.int32]) -> None:
        """Have the device's current stream wait for those copies into `slots` that were told before their end."""
        for flight in tuple(self._flying):
            if flight.told and (slots == flight.slot).any():
                torch.cuda.current_stream(self._device).wait_event(flight.last)

    def note_step(self, now: float) -> None:
        """A step has ended (time.monotonic).

        A step that is planned when one ends starts after the one that starts then. So a copy that ends within the
        shortest of the last steps' times counts as ended, and nothing waits for it; `lead_seconds` is a share of that.
        """
        times = self._step_times
        times.append(now)
        if len(times) == STEPS_WATCHED:
            shortest = min(later - earlier for earlier, later in pairwise(times))
            self.lead_seconds = min(max(LEAD_SHARE * shortest, LEAD_SECONDS), LONGEST_LEAD)

    def _look_at_flights(self) -> None:
        now = time.monotonic()
        for flight in tuple(self._flying):  # they end in order
            over = flight.last.query()
            if not flight.told and (over or (flight.due is not None and now >= flight.due - self.lead_seconds)):
                flight.told = True
                self._ended.append((flight.slot, flight.number, None))
            if over:
                self._copy_seconds = flight.first.elapsed_time(flight.last) / 1e3
                self._flying.popleft()
                self.store.release(flight.block)

    def load(self, slot: int, number: int) -> None:
        """Copy an adapter into a slot after the current stream's work, and wait for it; reads it first if need be."""
        block = self.store.prepare(number)
        if self._stream is None:
            self._copies_into.enqueue(slot, block)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with self.device_calls, torch.cuda.stream(self._stream):
                self._copies_into.enqueue(slot, block)
            self._stream.synchronize()
        self.store.release(block)

    def forget(self, number: int) -> None:
        """Drop what is kept of an adapter that nothing uses any more."""
        self._registry.drop(number)  # first, so that a read on its way leaves nothing
        self.store.forget(number)

    def _start_threads(self) -> None:
        if self._started:
            return
        self._started = True
        owner = weakref.ref(self)  # the threads must not keep the stacks alive
        stop, on_gpu = partial(_stop, self._reads, self._copies), self._device.type == "cuda"
        threads = [
            start_thread(_work, owner, name, jobs, on_gpu, name=f"adapter{name}", stop=stop)
            for name, jobs in (("_read", self._reads), ("_copy", self._copies))
        ]
        weakref.finalize(self, _end, stop, threads).atexit = False

    def _read(self, job: Read) -> None:
        *_, slot, number = job
        try:
            block = self.store.prepare(number)
        except Exception as error:
            if slot is not None:
                self._ended.append((slot, number, self._explain(number, error)))
            return
        if slot is not None and slot >= 0:
            self._copies.put((slot, number, block))
            return
        self.store.release(block)
        if slot is not None:
            self._ended.append((slot, number, None))

    def _copy(self, job: Copy) -> None:
        slot, number, block = job
        try:
            if self._stream is not None:
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin = max(time.monotonic(), self._busy_until)
                with self.device_calls, torch.cuda.stream(self._stream):
                    first.record(self._stream)
                    self._copies_into.enqueue(slot, block)
                    last.record(self._stream)
                due = None if self._copy_seconds is None else begin + self._copy_seconds
                self._busy_until = begin if due is None else due
                self._flying.append(Flight(slot, number, block, first, last, due))
                return
            self._copies_into.enqueue(slot, block)
            problem = None
        except Exception as error:
            problem = self._explain(number, error)
        self.store.release(block)
        self._ended.append((slot, number, problem))

    def _explain(self, number: int, error: Exception) -> str:
        """What a caller may read: no path of this machine."""
        try:
            known = self._registry.by_number(number)
        except KeyError:
            return "the adapter was removed"
        if isinstance(error, AdapterError):
            return (
                f"adapter {known.name!r} could not be loaded: {str(error).replace(str(known.path), repr(known.name))}"
            )
        if isinstance(error, OSError):
            return f"adapter {known.name!r} could not be loaded: {error.strerror or 'its files cannot be read'}"
        if isinstance(error, RuntimeError) and "interpreter shutdown" in str(error):  # of the pool that reads files
            return f"adapter {known.name!r} could not be loaded: the interpreter exits"
        _log.error("adapter %r could not be loaded", known.name, exc_info=error)
        return f"adapter {known.name!r} could not be loaded: a fault in the engine, see its log"


def _work(owner: "weakref.ref[AdapterStacks]", name: str, jobs: Any, on_gpu: bool) -> None:
    """A thread: does the jobs of a queue until it is told to stop or the stacks are gone."""
    if on_gpu:
        use_few_threads()
    while (job := jobs.get()) not in (None, NO_READ):
        stacks = owner()
        if stacks is None:
            return
        getattr(stacks, name)(job)
        del stacks, job


def _stop(reads: "queue.PriorityQueue[Read]", copies: "queue.SimpleQueue[Copy | None]") -> None:
    """End the threads after their present job."""
    reads.put(NO_READ)
    copies.put(None)


def _end(stop: Callable[[], None], threads: list[threading.Thread]) -> None:
    """Stop the threads and wait for them."""
    stop()
    for thread in threads:
        if thread is not threading.current_thread():  # the last reference may go in a thread of ours
            thread.join(STOP_SECONDS)
