"""A GPU process without a GPU, to measure the batcher: steps take a given time, tokens depend on context lengths.

The supervisor starts `python -m sidestream.tools.bench.serving.simulated_gpu FD`.
"""

import hashlib
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ....ops.core.kv_layout import PAGE_SIZE
from ....runtime.api.adapter_versions import AdapterVersion
from ....runtime.api.errors import RequestError
from ....runtime.processes.threads import prepare_types
from ....runtime.scheduler.step_plan import PageCopies, StepDrafts, StepMasks, StepPlan, StepResult, no_rows
from ....runtime.server import gpu_process
from ....runtime.server.gpu_link import LoadedAdapter, Ready, Update
from ....runtime.server.settings import ServeSettings

PROBES = 8


class SimulatedSizes(msgspec.Struct, kw_only=True):
    """`ServeSettings.llm` of a server on a simulated GPU."""

    step_seconds: float = 0.003
    load_seconds: float = 0.0
    num_pages: int = 64
    max_model_len: int = 512
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 128
    num_slots: int = 2
    vocabulary: int = 251
    eos_ids: list[int] = []
    seed: int = 0


prepare_types(SimulatedSizes)


class HashRunner:
    """The next token is a printable letter chosen by the context's length, or one that the masks allow."""

    def submit(self, plan: StepPlan) -> StepResult:
        """Return the tokens of a step."""
        return StepResult(plan.step, ((plan.context_lens * 31 + 7) % 90 + 32).astype(np.int32))

    def constrain(self, handle: StepResult, masks: StepMasks) -> None:
        """Choose a token of a few words of each mask, else the first one allowed."""
        if not len(masks.rows):  # all of them may have ended
            return
        words, rows = masks.words.view(np.uint32), np.arange(len(masks.rows))
        hashed = handle.tokens[masks.rows].astype(np.int64) * 7919 + masks.rows * 104729
        columns = (hashed[:, None] + np.arange(PROBES) * 1299709) % words.shape[1]
        found = columns[rows, (words[rows[:, None], columns] != 0).argmax(1)]
        without = np.flatnonzero(words[rows, found] == 0)
        found[without] = (words[without] != 0).argmax(1)
        handle.tokens[masks.rows] = 32 * found + np.log2(words[rows, found].astype(np.float64)).astype(np.int64)

    def collect(self, handle: StepResult) -> StepResult:
        """Return the result."""
        return handle

    def place(self, slot: int, number: int) -> None:
        """Ignore the arrival of an adapter."""


@dataclass
class TimedStep:
    """A step in progress: the inner runner's handle, and its end (time.monotonic)."""

    inner: Any
    ready_at: float


class TimedRunner:
    """Steps of `step_seconds` in a row, like a device that works asynchronously; adapters arrive after `load_seconds`.

    A step starts after the masks of the step before it have arrived.
    """

    def __init__(self, inner: Any, step_seconds: float, load_seconds: float) -> None:
        self.inner = inner
        self._step_seconds, self._load_seconds = step_seconds, load_seconds
        self._free_at = 0.0
        self._loads: list[tuple[float, int, int]] = []
        self._near: set[int] = set()

    def submit(self, plan: StepPlan) -> "TimedStep":
        """Start a step after the earlier ones."""
        handle = self.inner.submit(plan)
        self._free_at = max(time.monotonic(), self._free_at) + self._step_seconds
        return TimedStep(handle, self._free_at)

    def drafts(self, handle: "TimedStep") -> StepDrafts:
        """Return no drafts."""
        return StepDrafts(handle.inner.step, no_rows().reshape(0, 0))

    def constrain(self, handle: "TimedStep", masks: StepMasks) -> None:
        """Apply the masks of a step; it ends now if it had to wait for them."""
        handle.ready_at = self._free_at = max(time.monotonic(), self._free_at)
        self.inner.constrain(handle.inner, masks)

    def collect(self, handle: "TimedStep") -> StepResult:
        """Wait for the end of a step."""
        time.sleep(max(0.0, handle.ready_at - time.monotonic()))
        result: StepResult = self.inner.collect(handle.inner)
        return result

    def start_load(self, slot: int, number: int) -> None:
        """Start a copy."""
        self._loads.append((time.monotonic() + self._load_seconds, slot, number))

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        """Return the finished copies."""
        now = time.monotonic()
        done = [load for load in self._loads if load[0] <= now]
        self._loads = [load for load in self._loads if load[0] > now]
        for _, slot, number in done:
            self._near.add(number)
            if slot >= 0:
                self.inner.place(slot, number)
        return [(slot, number, None) for _, slot, number in done]

    def forget_adapter(self, number: int) -> None:
        """Remove an adapter from host memory."""
        self._near.discard(number)

    def copy_pages(self, copies: PageCopies) -> None:
        """Do nothing: without host pages there are no copies."""

    def copied(self, timeout: float = 0.0) -> list[tuple[int, str | None]]:
        """Return nothing."""
        return []

    def in_host_memory(self) -> list[int]:
        """Return the adapters in host memory."""
        return sorted(self._near)


class SimulatedModel:
    """See `gpu_process.Servable`."""

    def __init__(self, settings: ServeSettings) -> None:
        sizes = msgspec.convert(settings.llm, SimulatedSizes)
        self.runner = TimedRunner(HashRunner(), sizes.step_seconds, sizes.load_seconds)
        self._next = 0
        adapters = [self.add_adapter(name, path, False) for name, path in settings.adapters.items()]
        self.ready = Ready(
            sizes.vocabulary,
            sizes.num_pages,
            PAGE_SIZE,
            sizes.max_model_len,
            sizes.max_num_seqs,
            sizes.max_num_batched_tokens,
            sizes.num_slots,
            sizes.eos_ids,
            adapters,
            "a simulated GPU",
            lora_rank=64,
        )

    def add_adapter(self, name: str, path: str, replace: bool) -> LoadedAdapter:
        """Add an adapter; its path is ignored."""
        self._next += 1
        return LoadedAdapter(name, self._next - 1, 8, hashlib.sha256(path.encode()).hexdigest())

    def update_adapter(self, update: Update) -> tuple[LoadedAdapter, list[str]]:
        raise RequestError("a simulated GPU cannot update adapters")

    def restore_update(self, update: AdapterVersion) -> LoadedAdapter:
        raise RequestError("a simulated GPU cannot update adapters")

    def add_sum(self, number: int, parts: list[tuple[int, float]]) -> None:
        """Do nothing."""

    def remove_adapter(self, name: str) -> None:
        """Do nothing."""

    def in_host_memory(self) -> list[int]:
        """Return the adapters in host memory."""
        return self.runner.in_host_memory()


if __name__ == "__main__":
    sys.exit(gpu_process.run(int(sys.argv[1]), SimulatedModel))
