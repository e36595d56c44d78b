"""A trace of a running engine for Perfetto: steps with their kernels, copies, and the batcher, in four lanes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROFILED_OUTPUTS = 6


def write_profile(llm: Any, generate: Callable[[int], Any], path: Path) -> int:
    """Run `generate(PROFILED_OUTPUTS)` under torch's profiler, write the lanes to `path`, and return the steps.

    Raises ProfileError if the profiler recorded none of the engine's programs.
    """
    import torch

    from ...compiler.inspect.chrome_trace import lane_trace
    from ...compiler.inspect.profile import exported
    from ...compiler.run.profiler_ranges import step_ranges

    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = llm.device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    restore = name_batcher(llm.engine.scheduler)
    try:
        with step_ranges() as recording, torch.profiler.profile(activities=activities) as profiler:
            generate(PROFILED_OUTPUTS)
            if on_gpu:  # the same inputs again, step by step, to assign kernels of a replayed graph to steps
                for bound in list(recording.bound.values()):
                    if bound.captured:
                        bound.run()
                torch.cuda.synchronize()
    finally:
        restore()
    trace = lane_trace(exported(profiler), [bound.program for bound in recording.bound.values()])
    path.write_text(json.dumps(trace) + "\n")
    return sum("step" in event.get("args", {}) for event in trace["traceEvents"])


def name_batcher(scheduler: Any, methods: tuple[str, ...] = ("schedule", "commit")) -> Callable[[], None]:
    """Put the scheduler's calls into named ranges, and return a function that undoes it."""
    from ...compiler.inspect.chrome_trace import BATCHER
    from ...compiler.run.profiler_ranges import named

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with named(f"{BATCHER}{name}"):
                return call(*args, **kwargs)

        return run

    for name in methods:
        setattr(scheduler, name, wrapped(name, getattr(scheduler, name)))

    def restore() -> None:
        for name in methods:
            delattr(scheduler, name)

    return restore
