"""Map a profiler's trace to a program's steps: kernels and times of each step, also in a replayed CUDA graph.

The trace is the Chrome trace of `torch.profiler`. In a step-by-step run a kernel belongs to the step whose range
contains its launch. In a replay one launch starts all kernels: there the k-th kernel of a name belongs to the same step
as the k-th kernel of that name in the step-by-step run.
"""

import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cost.estimate import Placed, predecessors
from ..program.program import Program
from ..run.bound_program import BoundProgram
from ..run.profiler_ranges import REPLAY_RANGE, STEP_RANGE, step_ranges

KERNEL_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


class ProfileError(ValueError):
    """A trace does not contain the requested steps."""


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy on the GPU; times in seconds on the trace's clock."""

    name: str
    start: float
    end: float
    stream: int
    copy: bool


@dataclass(frozen=True)
class Range:
    """A named range of the host's time, and the kernels launched in it."""

    name: str
    start: float
    end: float
    kernels: tuple[Kernel, ...] = ()


def ranges(trace: Mapping[str, Any]) -> list[Range]:
    """Return the ranges of steps and replays in order of time; a kernel is in the innermost range of its launch."""
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    launched: dict[int, list[Kernel]] = defaultdict(list)
    for event in events:
        if event.get("cat") in KERNEL_CATEGORIES:
            start, end = _times(event)
            about = event.get("args", {})
            stream = int(about.get("stream", event.get("tid", 0)))
            kernel = Kernel(event["name"], start, end, stream, event["cat"] != "kernel")
            launched[int(about.get("correlation", -1))].append(kernel)
    marked = [event for event in events if event.get("cat") == "user_annotation"]
    found = sorted(
        (event for event in marked if STEP_RANGE.fullmatch(event["name"]) or REPLAY_RANGE.fullmatch(event["name"])),
        key=lambda event: event["ts"],
    )
    kernels: list[list[Kernel]] = [[] for _ in found]
    position = 0
    launches = (event for event in events if event.get("cat") in LAUNCH_CATEGORIES)
    for event in sorted(launches, key=lambda event: event["ts"]):
        while position < len(found) and found[position]["ts"] + found[position]["dur"] < event["ts"]:
            position += 1
        started = position < len(found) and found[position]["ts"] <= event["ts"]
        if started and found[position].get("tid") == event.get("tid"):
            kernels[position] += launched.get(int(event.get("args", {}).get("correlation", -1)), [])
    return [
        Range(event["name"], *_times(event), tuple(sorted(own, key=lambda kernel: kernel.start)))
        for event, own in zip(found, kernels, strict=True)
    ]


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    return event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6


def kernels_of_steps(program: Program, found: Iterable[Range]) -> dict[int, tuple[str, ...]]:
    """Return step -> names of its kernels in order, from the last step-by-step run. Raises ProfileError without one."""
    names: dict[int, tuple[str, ...]] = {}
    for each in found:
        match = STEP_RANGE.fullmatch(each.name)
        if match is not None and match["program"] == program.name:
            names[int(match["index"])] = tuple(kernel.name for kernel in each.kernels)
    if len(names) != len(program.steps):
        raise ProfileError(
            f"the trace has {len(names)} of the {len(program.steps)} steps of {program.name}; run it step by step "
            "within step_ranges()"
        )
    return names


def replays(program: Program, found: Iterable[Range], names: Mapping[int, tuple[str, ...]]) -> list[list[Placed]]:
    """Return each step's times in each replay, in seconds from the replay's first kernel.

    A step without kernels has the duration 0. Raises ProfileError if a replay's kernels differ from the steps'.
    """
    expected = Counter(name for own in names.values() for name in own)
    results = []
    for each in found:
        match = REPLAY_RANGE.fullmatch(each.name)
        if match is None or match["program"] != program.name:
            continue
        have = Counter(kernel.name for kernel in each.kernels)
        if have != expected:
            missing, surplus = expected - have, have - expected
            raise ProfileError(
                f"a replay of {program.name} ran other kernels than its steps: missing {dict(missing)}, unexpected "
                f"{dict(surplus)}"
            )
        results.append(_place(program, each.kernels, names))
    return results


def _place(program: Program, kernels: Sequence[Kernel], names: Mapping[int, tuple[str, ...]]) -> list[Placed]:
    queues: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        queues[kernel.name].append(kernel)
    begin = min((kernel.start for kernel in kernels), default=0.0)
    taken: Counter[str] = Counter()
    placed: list[Placed] = []
    before = predecessors(program)
    for step in program.steps:
        own = []
        for name in names[step.index]:
            own.append(queues[name][taken[name]])
            taken[name] += 1
        if own:
            start, end = min(kernel.start for kernel in own), max(kernel.end for kernel in own)
            placed.append(Placed(start - begin, end - begin))
        else:
            moment = max((placed[index].end for index in before[step.index]), default=0.0)
            placed.append(Placed(moment, moment))
    return placed


def capture_profile(bound: BoundProgram, count: int) -> list[list[Placed]]:
    """Profile `bound` on a GPU and return the steps' times in each of `count` replays.

    It runs once step by step and `count` times as a CUDA graph, which is captured if needed. Raises ProfileError if
    kernels can't be attributed.
    """
    if not bound.captured:
        bound.capture()
    bound.replay()
    torch.cuda.synchronize(bound.device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with step_ranges(), torch.profiler.profile(activities=activities) as profiler:
        bound.run()
        torch.cuda.synchronize(bound.device)
        for _ in range(count):
            bound.replay()
            torch.cuda.synchronize(bound.device)
    found = ranges(exported(profiler))
    return replays(bound.program, found, kernels_of_steps(bound.program, found))


def exported(profiler: Any) -> dict[str, Any]:
    """Return the Chrome trace of a finished torch profiler."""
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        return json.loads(Path(path).read_text(encoding="utf-8"))
    finally:
        Path(path).unlink(missing_ok=True)
