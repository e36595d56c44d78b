"""A GPU process that measures itself: how long the device stands still between steps (workload G). `python -m sidestream.tools.traced_gpu FD`.

Chosen through `ServeSettings.gpu_command` or `sidestream serve --trace-steps FILE`. After a warm-up of steps it profiles some hundred steps, writes the
trace (Chrome, Perfetto) and the figures beside it, and serves on without a profiler.
"""

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from ..runtime import gpu_process
from ..runtime.plan import StepPlan
from ..runtime.serve_settings import ServeSettings
from ..runtime.served_llm import ServedLLM

_log = logging.getLogger(__name__)
FILE_VARIABLE = "SIDESTREAM_TRACE_STEPS"
WARM_UP_STEPS = 100
TRACED_STEPS = 100
GAP_US = 2.0
"""Shorter pauses are kernel boundaries within a step."""


class TracedRunner:
    """Counts decode steps of one size, and profiles `TRACED_STEPS` of them."""

    def __init__(self, inner: Any, file: Path) -> None:
        self._inner, self._file = inner, file
        self._steps = 0
        self._profiler: Any = None
        self._sizes: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, plan: StepPlan) -> Any:
        """As the runner's."""
        if not plan.decode:
            return self._submit(plan)
        self._steps += 1
        if self._steps == WARM_UP_STEPS:
            self._start()
        if self._profiler is not None:
            self._sizes.add(plan.num_sequences)
            if self._steps >= WARM_UP_STEPS + TRACED_STEPS:
                self._stop()
        return self._submit(plan)

    def _submit(self, plan: StepPlan) -> Any:
        if self._profiler is None:
            return self._inner.submit(plan)
        from torch.profiler import record_function

        with record_function(f"step {plan.step}: {plan.num_tokens} tokens"):
            return self._inner.submit(plan)

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
        figures = idle_figures(json.loads(self._file.read_text())["traceEvents"], TRACED_STEPS) | {"sequences": sorted(self._sizes)}
        self._file.with_suffix(".figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        _log.info("traced: %s", figures)


def idle_figures(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Microseconds a step for which nothing ran on the device: in all pauses, and in those longer than a kernel boundary."""
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    )  # fmt: skip
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


class TracedLLM(ServedLLM):
    """A `ServedLLM` whose runner is watched."""

    def __init__(self, settings: ServeSettings) -> None:
        super().__init__(settings)
        self.runner = TracedRunner(self.runner, Path(os.environ[FILE_VARIABLE]))  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(gpu_process.run(int(sys.argv[1]), TracedLLM))
