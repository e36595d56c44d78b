"""A GPU process whose model is `fake_runner`'s hash, which checks every plan: `python -m support.fake_gpu FD`."""

import contextlib
import errno
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.adapter_versions import AdapterVersion
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.scheduler.step_plan import AHEAD, StepPlan, StepResult
from sidestream.runtime.server import gpu_process
from sidestream.runtime.server.gpu_link import LoadedAdapter, Ready, Update
from sidestream.runtime.server.settings import ServeSettings
from sidestream.runtime.text.chat_files import read_adapter_chat
from sidestream.tools.bench.serving.simulated_gpu import SimulatedSizes, TimedRunner

from support.fake_runner import FakeRunner


class FakeSizes(SimulatedSizes, kw_only=True):
    """`ServeSettings.llm` of a fake server.

    `poison`: a step that holds this token thrice in a row raises; `hang`: one that holds this token so never returns;
    `hold`: while this file exists, no step ends that has a sequence of more tokens than the number in it;
    `fail_start`: what the start-up fails with.
    """

    step_seconds: float = 0.0
    poison: int | None = None
    hang: int | None = None
    hold: str | None = None
    fail_start: str | None = None
    lora_rank: int = 64
    max_adapter_sums: int = 64


class Checked(FakeRunner):
    """A FakeRunner that can be poisoned and held."""

    def __init__(self, sizes: FakeSizes) -> None:
        super().__init__(sizes.num_pages, sizes.num_slots, sizes.vocabulary, lag=AHEAD - 1)
        self.poison, self.hang = sizes.poison, sizes.hang
        self.hold = None if sizes.hold is None else Path(sizes.hold)

    def submit(self, plan: StepPlan) -> StepResult:
        if _holds_thrice(plan, self.hang):
            threading.Event().wait()
        if _holds_thrice(plan, self.poison):
            self.fail(plan)
            raise RuntimeError("a poisoned step")
        return super().submit(plan)

    def collect(self, handle: StepResult) -> StepResult:
        longest = int(self.plans[handle.step].context_lens.max())
        while longest > self._held_beyond():
            time.sleep(0.002)
        return super().collect(handle)

    def _held_beyond(self) -> float:
        if self.hold is not None:
            with contextlib.suppress(FileNotFoundError):
                return int(self.hold.read_text() or 0)
        return float("inf")

    def place(self, slot: int, number: int) -> None:
        self.slots[slot] = number


def _holds_thrice(plan: StepPlan, token: int | None) -> bool:
    return (
        token is not None
        and plan.num_tokens > 2
        and [token] * 3 in np.lib.stride_tricks.sliding_window_view(plan.input_ids, 3).tolist()
    )


class FakeServed:
    """See `gpu_process.Servable`. An adapter's path must be a directory, of which the last name counts as its content;
    while a file `held` is in it, it is being read. A file `invocation` makes it an aLoRA; with a file `unreadable` it
    can't be read once.
    """

    def __init__(self, settings: ServeSettings) -> None:
        sizes = msgspec.convert(settings.llm, FakeSizes)
        if sizes.fail_start is not None:
            raise ValueError(sizes.fail_start)
        self._next = 0
        self._lock = threading.Lock()
        self.runner = TimedRunner(Checked(sizes), sizes.step_seconds, sizes.load_seconds)
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
            "a fake",
            lora_rank=sizes.lora_rank,
            max_adapter_sums=sizes.max_adapter_sums,
        )

    def add_adapter(self, name: str, path: str, replace: bool) -> LoadedAdapter:
        if not Path(path).is_dir():
            raise FileNotFoundError(2, "No such file or directory", path)
        while (Path(path) / "held").exists():
            time.sleep(0.005)
        if (Path(path) / "unreadable").exists():
            (Path(path) / "unreadable").unlink()
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        with self._lock:
            number = self._next
            self._next += 1
        content = hashlib.sha256(Path(path).name.encode()).hexdigest()
        file = Path(path) / "invocation"
        invocation = tuple(json.loads(file.read_text())) if file.exists() else ()
        return LoadedAdapter(name, number, 8, content, read_adapter_chat(Path(path)), invocation)

    def update_adapter(self, update: Update) -> tuple[LoadedAdapter, list[str]]:
        raise RequestError("the fake has no tensors")

    def restore_update(self, update: AdapterVersion) -> LoadedAdapter:
        raise RequestError("the fake has no tensors")

    def add_sum(self, number: int, parts: list[tuple[int, float]]) -> None:
        pass

    def remove_adapter(self, name: str) -> None:
        pass

    def in_host_memory(self) -> list[int]:
        return self.runner.in_host_memory()


if __name__ == "__main__":
    sys.exit(gpu_process.run(int(sys.argv[1]), FakeServed))
