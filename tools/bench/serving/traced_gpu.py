"""A GPU process that measures idle time of the device between steps (workload G), for `serve --trace-steps FILE`.

After warm-up decode steps it times some hundred steps with CUDA events, then some hundred under a profiler. It writes
the trace (FILE, for Chrome or Perfetto) and the figures of both (.figures.json); steps with adapters have files with
-lora in their names. It continues to serve.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from ....runtime.scheduler.step_plan import StepPlan
from ....runtime.server import gpu_process
from ....runtime.server.settings import ServeSettings

_log = logging.getLogger(__name__)
FILE_VARIABLE = "SIDESTREAM_TRACE_STEPS"
WARM_UP_STEPS = 100
TIMED_STEPS = 100
TRACED_STEPS = 100
GAP_US = 2.0
"""Shorter pauses are kernel boundaries within a step."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Trace:
    """Times `TIMED_STEPS` decode steps with events, and profiles `TRACED_STEPS`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._steps = 0
        self._profiler: Any = None
        self._sizes: set[int] = set()
        self._events: list[tuple[Any, Any]] = []

    def submit(self, plan: StepPlan, submit: Callable[[StepPlan], Any]) -> Any:
        """Submit a plan, timed or profiled."""
        self._steps += plan.decode
        traced_from = WARM_UP_STEPS + TIMED_STEPS
        if plan.decode and self._steps == traced_from:
            self._start()
        if self._profiler is not None and self._steps >= traced_from + TRACED_STEPS:
            self._stop()
        if not WARM_UP_STEPS <= self._steps < traced_from + TRACED_STEPS:
            return submit(plan)
        if plan.decode:
            self._sizes.add(plan.num_sequences)
        return self._timed(plan, submit) if self._profiler is None else self._profiled(plan, submit)

    def _timed(self, plan: StepPlan, submit: Callable[[StepPlan], Any]) -> Any:
        """Record events around the step on the compute stream; copies from and to the host are not between them."""
        import torch

        if not torch.cuda.is_available():
            return submit(plan)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        handle = submit(plan)
        last.record()
        self._events.append((first, last))
        return handle

    def _profiled(self, plan: StepPlan, submit: Callable[[StepPlan], Any]) -> Any:
        from torch.profiler import record_function

        with record_function(f"step {plan.step}: {plan.num_tokens} tokens"):
            return submit(plan)

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        threading.Thread(target=self._write, args=(profiler,), daemon=True).start()

    def _write(self, profiler: Any) -> None:
        profiler.export_chrome_trace(str(self._file))
        events = json.loads(self._file.read_text())["traceEvents"]
        figures: dict[str, Any] = {"sequences": sorted(self._sizes)}
        if self._events:
            spans = [
                (self._events[0][0].elapsed_time(first), self._events[0][0].elapsed_time(last))
                for first, last in self._events
            ]
            figures["between_events"] = between_events(spans)
        figures["profiled"] = idle_figures(events, TRACED_STEPS)
        self._file.with_suffix(".figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        _log.info("traced: %s", figures)


class TracedRunner:
    """Traces steps without adapters into `file`, and those with adapters into a file with -lora in its name."""

    def __init__(self, inner: Any, file: Path) -> None:
        self._inner = inner
        self._traces = {False: Trace(file), True: Trace(file.with_stem(file.stem + "-lora"))}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, plan: StepPlan) -> Any:
        """Submit a plan to the inner runner."""
        return self._traces[plan.uses_lora].submit(plan, self._inner.submit)


def between_events(spans: list[tuple[float, float]]) -> dict[str, Any]:
    """Return idle time between (begin, end) of consecutive steps in ms, the events included."""
    pauses = [1e3 * max(0.0, begin - end) for (_, end), (begin, _) in pairwise(spans)]
    total = 1e3 * (spans[-1][1] - spans[0][0])
    return {
        "steps": len(spans),
        "step_us": total / len(spans),
        "idle_us_per_step": sum(pauses) / max(1, len(pauses)),
        "idle_share": sum(pauses) / total,
        "longest_pause_us": max(pauses, default=0.0),
    }


def idle_figures(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return microseconds per step without device work: all pauses, and those longer than a kernel boundary."""
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in DEVICE and "dur" in event
    )
    if not spans:
        return {"device_events": 0}
    end, pauses = spans[0][1], []
    for first, last in spans[1:]:
        if first > end:
            pauses.append(first - end)
        end = max(end, last)
    total = end - spans[0][0]
    long = [pause for pause in pauses if pause > GAP_US]
    return {
        "device_events": len(spans),
        "step_us": total / steps,
        "idle_us_per_step": sum(long) / steps,
        "idle_share": sum(long) / total,
        "pauses_per_step": len(long) / steps,
        "longest_pause_us": max(long, default=0.0),
        "kernel_boundaries_us_per_step": (sum(pauses) - sum(long)) / steps,
    }


class TracedModel(gpu_process.ServedModel):
    """A `ServedModel` with a traced runner."""

    def __init__(self, settings: ServeSettings) -> None:
        super().__init__(settings)
        self.runner = TracedRunner(self.runner, Path(os.environ[FILE_VARIABLE]))


if __name__ == "__main__":
    sys.exit(gpu_process.run(int(sys.argv[1]), TracedModel))
