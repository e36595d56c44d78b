"""A GPU process without a GPU, for measuring the batcher: steps take a given time, tokens follow from the context's
length.

`python -m sidestream.tools.bench.serving.simulated_gpu FD` is how the supervisor starts it.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ....ops.core.kv_layout import PAGE_SIZE
from ....runtime.scheduler.step_plan import StepDrafts, StepMasks, StepPlan, StepResult, no_rows
from ....runtime.server import gpu_process
from ....runtime.server.gpu_link import LoadedAdapter, Ready
from ....runtime.server.settings import ServeSettings

PROBES = 8


class SimulatedSizes(msgspec.Struct, kw_only=True):
    """`ServeSettings.llm` of a server that runs on it."""

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


class HashRunner:
    """Next token = a printable letter that follows from the context's length; of constrained sequences one that may
    come, which follows from it too.
    """

    def submit(self, plan: StepPlan) -> StepResult:
        """A step's tokens, at once."""
        return StepResult(plan.step, ((plan.context_lens * 31 + 7) % 90 + 32).astype(np.int32))

    def constrain(self, handle: StepResult, masks: StepMasks) -> None:
        """Look for a token in a few words of each mask, then from its beginning on."""
        if not len(masks.rows):  # all of them have ended meanwhile
            return
        words, rows = masks.words.view(np.uint32), np.arange(len(masks.rows))
        hashed = handle.tokens[masks.rows].astype(np.int64) * 7919 + masks.rows * 104729
        columns = (hashed[:, None] + np.arange(PROBES) * 1299709) % words.shape[1]
        found = columns[rows, (words[rows[:, None], columns] != 0).argmax(1)]
        without = np.flatnonzero(words[rows, found] == 0)
        found[without] = (words[without] != 0).argmax(1)
        handle.tokens[masks.rows] = 32 * found + np.log2(words[rows, found].astype(np.float64)).astype(np.int64)

    def collect(self, handle: StepResult) -> StepResult:
        """The same."""
        return handle

    def place(self, slot: int, number: int) -> None:
        """An adapter has arrived; nothing depends on it."""


@dataclass
class TimedStep:
    """A step on its way: what `inner` knows of it, and when it ends (time.monotonic)."""

    inner: Any
    ready_at: float


class TimedRunner:
    """Steps follow each other at `step_seconds`, as on a device that works by itself, and no sooner than the masks of
    the step before have come; adapters arrive after `load_seconds`.
    """

    def __init__(self, inner: Any, step_seconds: float, load_seconds: float) -> None:
        self.inner = inner
        self._step_seconds, self._load_seconds = step_seconds, load_seconds
        self._free_at = 0.0
        self._loads: list[tuple[float, int, int]] = []
        self._near: set[int] = set()

    def submit(self, plan: StepPlan) -> "TimedStep":
        """Start a step after those that were started before."""
        handle = self.inner.submit(plan)
        self._free_at = max(time.monotonic(), self._free_at) + self._step_seconds
        return TimedStep(handle, self._free_at)

    def drafts(self, handle: "TimedStep") -> StepDrafts:
        """No step has any."""
        return StepDrafts(handle.inner.step, no_rows().reshape(0, 0))

    def constrain(self, handle: "TimedStep", masks: StepMasks) -> None:
        """A step's masks have come: it ends now if it has waited for them."""
        handle.ready_at = self._free_at = max(time.monotonic(), self._free_at)
        self.inner.constrain(handle.inner, masks)

    def collect(self, handle: "TimedStep") -> StepResult:
        """Wait for a step's end."""
        time.sleep(max(0.0, handle.ready_at - time.monotonic()))
        result: StepResult = self.inner.collect(handle.inner)
        return result

    def start_load(self, slot: int, number: int) -> None:
        """Begin a copy."""
        self._loads.append((time.monotonic() + self._load_seconds, slot, number))

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        """Copies that are over."""
        now = time.monotonic()
        done = [load for load in self._loads if load[0] <= now]
        self._loads = [load for load in self._loads if load[0] > now]
        for _, slot, number in done:
            self._near.add(number)
            if slot >= 0:
                self.inner.place(slot, number)
        return [(slot, number, None) for _, slot, number in done]

    def forget_adapter(self, number: int) -> None:
        """It is not in host memory any more."""
        self._near.discard(number)

    def in_host_memory(self) -> list[int]:
        """The adapters that have arrived at least once."""
        return sorted(self._near)


class SimulatedModel:
    """See `gpu_process.Served`."""

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
        )

    def add_adapter(self, name: str, path: str, replace: bool) -> LoadedAdapter:
        """Any path will do."""
        self._next += 1
        return LoadedAdapter(name, self._next - 1, 8, f"{self._next:064x}")

    def remove_adapter(self, name: str) -> None:
        """Nothing is kept."""

    def in_host_memory(self) -> list[int]:
        """The adapters that have arrived at least once."""
        return self.runner.in_host_memory()


if __name__ == "__main__":
    sys.exit(gpu_process.run(int(sys.argv[1]), SimulatedModel))
