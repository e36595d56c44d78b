"""What planning costs on the CPU: milliseconds per step of `schedule` and `commit`, and of the text after them, for
many streams.

    python -m sidestream.tools.dev.bench.scheduler [--streams 256] [--steps 400]

No device and no model: tokens are made up. Every stream decodes; as each ends, a new one with a prompt takes its place,
so admission, the prefix cache and page allocation are in the figures. With adapters, each request picks one with p(k) ~
1/k; copies take no time. `streams` is how many sequences got a token in a step: when many adapters share few slots, the
others wait for a slot.
"""

import argparse
import platform
import random
import time

import numpy as np

from ....runtime.api.request import Request
from ....runtime.api.sampling_params import SamplingParams
from ....runtime.engine.engine import Engine
from ....runtime.scheduler.limits import SchedulerLimits
from ....runtime.scheduler.scheduler import Scheduler
from ....runtime.scheduler.step_plan import StepDrafts, StepMasks, StepPlan, StepResult, no_rows
from ...options.engine import positive

VOCABULARY = 32000
OUTPUT_LENGTHS = (64, 448)
PROMPT_LENGTHS = (64, 512)
SLOTS = 32


class InstantRunner:
    """Answers every step with made-up tokens, and has every adapter at once."""

    def __init__(self) -> None:
        self._source = np.random.default_rng(0)
        self._loads: list[tuple[int, int, str | None]] = []

    def submit(self, plan: StepPlan) -> StepResult:
        """Compute nothing."""
        return StepResult(plan.step, self._source.integers(VOCABULARY, size=plan.num_sequences, dtype=np.int32))

    def drafts(self, handle: StepResult) -> StepDrafts:
        """No step has any."""
        return StepDrafts(handle.step, no_rows().reshape(0, 0))

    def constrain(self, handle: StepResult, masks: StepMasks) -> None:
        """No request here is constrained."""

    def collect(self, handle: StepResult) -> StepResult:
        """What `submit` made up."""
        return handle

    def start_load(self, slot: int, number: int) -> None:
        """Be done with it."""
        self._loads.append((slot, number, None))

    def loaded(self, timeout: float = 0.0) -> list[tuple[int, int, str | None]]:
        """All that was started."""
        loads, self._loads = self._loads, []
        return loads

    def forget_adapter(self, number: int) -> None:
        """Nothing to forget."""


def measure(streams: int, steps: int, adapters: int, stream_text: bool) -> dict[str, np.ndarray]:
    """Milliseconds of each step by part, and the sequences that got a token."""
    source = random.Random(0)
    names = [f"adapter{index}" for index in range(adapters)]
    limits = SchedulerLimits(streams * 24, 2048, streams, max(streams, 8192), min(SLOTS, adapters))
    scheduler = Scheduler(limits, {name: index for index, name in enumerate(names)}, asynchronous_loads=True)
    runner = InstantRunner()
    engine = Engine(scheduler, runner, None, overlap=True)
    weights = [1 / rank for rank in range(1, adapters + 1)]
    beginning = [source.randrange(VOCABULARY) for _ in range(256)]
    made = 0

    def add(count: int) -> None:
        nonlocal made
        for _ in range(count):
            ids = beginning[: source.choice((0, 256))] + [
                source.randrange(VOCABULARY) for _ in range(source.randrange(*PROMPT_LENGTHS))
            ]
            params = SamplingParams(
                temperature=0.0, max_tokens=source.randrange(*OUTPUT_LENGTHS), ignore_eos=True, detokenize=False
            )
            adapter = source.choices(names, weights)[0] if names else None
            engine.add(Request(str(made), None, ids, params, adapter), stream_text)
            made += 1

    add(streams + streams // 8)
    times: dict[str, list[float]] = {"running": [], "plan": [], "commit": [], "text": [], "whole": []}
    flying: list[StepResult] = []
    for step in range(steps + 50):
        begin = time.thread_time()
        engine.take_loads_in()
        plan = engine.plan()
        planned = time.thread_time()
        if plan is not None:
            flying.append(runner.submit(plan))
        if not flying or (len(flying) < 2 and plan is not None):
            continue
        result = flying.pop(0)
        before = time.thread_time()
        progress = engine.commit(result)
        committed = time.thread_time()
        _, finished = engine.deliver(progress, result)
        end = time.thread_time()
        add(len(finished))
        if step >= 50:
            times["running"].append(len(progress))
            parts = {"plan": planned - begin, "commit": committed - before, "text": end - committed}
            for name, seconds in (parts | {"whole": sum(parts.values())}).items():
                times[name].append(1e3 * seconds)
    return {name: np.asarray(values) for name, values in times.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=positive, default=256)
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--adapters", type=positive, default=200)
    options = parser.parse_args()
    print(
        f"{options.streams} streams, {options.steps} steps; {platform.processor() or platform.machine()}, Python "
        f"{platform.python_version()}"
    )
    print("CPU milliseconds per step: median (99th percentile); `whole` = plan + commit + text\n")
    print(f"{'':<30}{'streams':>9}{'plan':>16}{'commit':>16}{'text':>16}{'whole':>16}")
    cases = (
        ("no adapters, text at the end", 0, False),
        ("no adapters, streaming", 0, True),
        (f"{SLOTS} adapters, all resident", SLOTS, True),
        (f"{options.adapters} adapters over {SLOTS} slots", options.adapters, True),
    )
    for label, adapters, stream_text in cases:
        times = measure(options.streams, options.steps, adapters, stream_text)
        running = times.pop("running").mean()
        cells = [f"{np.median(values):>8.3f} ({np.percentile(values, 99):.2f})".rjust(16) for values in times.values()]
        print(f"{label:<30}{running:>9.0f}{''.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
