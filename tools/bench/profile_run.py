"""A profile of an engine at work, for Perfetto: its programs' steps by name with their real kernels, copies, and the
batcher's work, in four lanes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROFILED_OUTPUTS = 6


def write_profile(llm: Any, generate: Callable[[int], Any], path: Path) -> int:
    """Runs `generate(PROFILED_OUTPUTS)` under torch's profiler and writes the lanes to `path`; returns how many steps
    of programs it shows.

    Raises ProfileError when the profiler saw none of the engine's programs.
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
            if on_gpu:  # the same inputs once more, step by step: so a replayed graph's kernels get their steps
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
    """Puts the scheduler's work into ranges of its own; returns what takes them away again."""
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
