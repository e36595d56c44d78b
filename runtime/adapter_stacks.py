"""The adapters' way into the device's stacks, beside the steps: disk -> host memory -> slot, each on a thread of its own."""
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch

from ..compiler.recipe import Recipe
from ..graphs.adapter import AdapterError
from ..graphs.lora import LoraShape
from .adapter_store import AdapterStore, Block
from .adapters import AdapterRegistry

STOP_SECONDS = 30.0
POLL_SECONDS = 0.0002
_log = logging.getLogger(__name__)
Report = tuple[int, int, str | None]
Copy = tuple[int, int, Block]
Read = tuple[int, int, int | None, int]  # rank, serial number, slot (None: no report is wanted), adapter
NO_READ: Read = (-1, -1, None, -1)


class AdapterStacks:
    """The stacks [S, ...] on the device, and what brings adapters into them.

    `start` begins a copy into a slot that no step at work reads, `finished` tells which copies have ended; the caller lets no step use the slot in between.
    A copy from host memory is one run of asynchronous copies on a stream of its own. `device_calls` must be held by whoever captures a CUDA graph: other
    threads must not call the device meanwhile.
    """

    def __init__(self, recipes: Mapping[str, Recipe], stacks: Mapping[str, torch.Tensor], registry: AdapterRegistry, lora: LoraShape, keep: int) -> None:
        self.stacks = dict(stacks)
        self.lora = lora
        self.device_calls = threading.Lock()
        self.store = AdapterStore(recipes, stacks, registry, lora, keep, self.device_calls)
        self._registry = registry
        self._device = next(iter(stacks.values())).device
        self._slots = [[stacks[name][slot] for name in recipes] for slot in range(lora.slots)]
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._reads: queue.PriorityQueue[Read] = queue.PriorityQueue()
        self._copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._flying: deque[tuple[int, int, Block, Any]] = deque()
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
        """(slot, number, None or what went wrong) of each `start` that has ended since the last call; waits up to `timeout` seconds for the first."""
        until = time.monotonic() + timeout
        while True:
            while self._flying and self._flying[0][3].query():
                slot, number, block, _ = self._flying.popleft()
                self.store.release(block)
                self._ended.append((slot, number, None))
            if self._ended or time.monotonic() >= until:
                return [self._ended.popleft() for _ in range(len(self._ended))]
            time.sleep(POLL_SECONDS)

    def load(self, slot: int, number: int) -> None:
        """Copy an adapter into a slot in the order of the current stream; reads it first if need be."""
        block = self.store.prepare(number)
        torch._foreach_copy_(self._slots[slot], block.tensors, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.store.release(block)

    def forget(self, number: int) -> None:
        """Drop what is kept of an adapter that nothing uses any more."""
        self.store.forget(number)
        self._registry.drop(number)

    def _start_threads(self) -> None:
        if self._started:
            return
        self._started = True
        owner = weakref.ref(self)  # the threads must not keep the stacks alive
        threads = [threading.Thread(target=_work, args=(owner, name, jobs), name=f"adapter{name}", daemon=True)
                   for name, jobs in (("_read", self._reads), ("_copy", self._copies))]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _stop, self._reads, self._copies, threads)

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
                with self.device_calls, torch.cuda.stream(self._stream):
                    torch._foreach_copy_(self._slots[slot], block.tensors, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(self._stream)
                self._flying.append((slot, number, block, event))
                return
            torch._foreach_copy_(self._slots[slot], block.tensors)
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
            return f"adapter {known.name!r} could not be loaded: {str(error).replace(str(known.path), repr(known.name))}"
        if isinstance(error, OSError):
            return f"adapter {known.name!r} could not be loaded: {error.strerror or 'its files cannot be read'}"
        _log.error("adapter %r could not be loaded", known.name, exc_info=error)
        return f"adapter {known.name!r} could not be loaded: a fault in the engine, see its log"


def _work(owner: "weakref.ref[AdapterStacks]", name: str, jobs: Any) -> None:
    """A thread: does the jobs of a queue until it is told to stop or the stacks are gone."""
    while (job := jobs.get()) not in (None, NO_READ):
        stacks = owner()
        if stacks is None:
            return
        getattr(stacks, name)(job)
        del stacks, job


def _stop(reads: "queue.PriorityQueue[Read]", copies: "queue.SimpleQueue[Copy | None]", threads: list[threading.Thread]) -> None:
    """Ends the threads behind their present job and waits: an interpreter that exits while one is inside torch is terminated by the C++ runtime."""
    reads.put(NO_READ)
    copies.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the last reference may go in a thread of ours
            thread.join(STOP_SECONDS)
