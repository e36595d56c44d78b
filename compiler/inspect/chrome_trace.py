"""A program's schedule in Chrome's trace format (Perfetto): lanes main, side, copies and batcher, waits as arrows.

`trace` shows estimated steps; `lane_trace` converts a profiler's trace, with real kernels under each step.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from ..cost.bytes_and_flops import link_bytes, step_bytes
from ..cost.estimate import Placed, estimate, total_seconds
from ..cost.hardware import H200, Gpu
from ..program.program import Program
from ..run.profiler_ranges import REPLAY_RANGE, STEP_RANGE
from .profile import KERNEL_CATEGORIES, ProfileError, Range, kernels_of_steps, ranges, replays

LANES = {"main": 1, "side": 2, "copies": 3, "batcher": 4}


def trace(program: Program, *, gpu: Gpu = H200) -> dict[str, Any]:
    """Return the estimated trace of one run of a program, for Perfetto.

    Inputs are copied before the first step, results after the last one; the batcher may plan the next step at the same
    time.
    """
    timing = estimate(program, gpu=gpu)
    arrive, leave = _copies(program, gpu)
    shift, total = arrive, total_seconds(timing)
    events = lane_names(f"{program.name} (estimate)")
    events.append(span("copies", "inputs to the GPU", 0.0, arrive, {"bytes": input_bytes(program)}))
    events.append(span("batcher", "plans the next step (at most this long)", shift, shift + total, {}))
    flows = count(1)  # Perfetto requires numbers as ids of arrows
    for step, where in zip(program.steps, timing, strict=True):
        about = {"step": step.index, "name": step.name, "bytes": step_bytes(program, step)}
        if link_bytes(program, step):
            about["nvlink_bytes"] = link_bytes(program, step)
        arguments = {**about, "sm_budget": step.sm_budget, "pdl": step.pdl, "waits": list(step.waits)}
        events.append(span(step.stream, step.op, shift + where.start, shift + where.end, arguments))
        for wait in step.waits:
            flow = {"cat": "wait", "name": "wait", "id": next(flows), "pid": 1}
            source, end = LANES[program.steps[wait].stream], microseconds(shift + timing[wait].end - 1e-9)
            target, start = LANES[step.stream], microseconds(shift + where.start)
            events.append({"ph": "s", **flow, "tid": source, "ts": end})
            events.append({"ph": "f", "bp": "e", **flow, "tid": target, "ts": start})
    events.append(span("copies", "sampled tokens to the host", shift + total, shift + total + leave, {}))
    return {"displayTimeUnit": "ns", "traceEvents": events}


def lane_names(process: str) -> list[dict[str, Any]]:
    """Return the events that set the name of a process, and the names and order of its lanes."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}]
    for lane, thread in LANES.items():
        label = f"{lane} stream" if lane in ("main", "side") else lane
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": label}})
        order = {"sort_index": thread}
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_sort_index", "args": order})
    return events


def span(lane: str, name: str, start: float, end: float, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bar from `start` to `end` in seconds; both are rounded, so that adjacent bars do not overlap."""
    first, last = microseconds(start), microseconds(end)
    return {
        "ph": "X",
        "pid": 1,
        "tid": LANES[lane],
        "name": name,
        "ts": first,
        "dur": round(last - first, 3),
        "args": dict(arguments),
    }


def microseconds(seconds: float) -> float:
    """Return seconds as microseconds, the unit of a trace, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)


def input_bytes(program: Program) -> int:
    """Return the bytes copied from the host at each step: token ids, positions, slots, block tables."""
    inputs = program.of_kind("input")
    return sum(buffer.nbytes for buffer in inputs if not buffer.name.startswith(("kv_cache", "kv_scale")))


def _copies(program: Program, gpu: Gpu) -> tuple[float, float]:
    """Return the estimated seconds of the copies to the GPU and back."""
    rows = program.bucket.sequences if program.bucket is not None else 1
    rate = gpu.copy_gbs * 1e9
    return gpu.copy_latency + input_bytes(program) / rate, gpu.copy_latency + 4 * rows / rate


BATCHER = "batcher "  # prefix of the ranges of the host's work between steps


def lane_trace(trace: Mapping[str, Any], programs: Iterable[Program]) -> dict[str, Any]:
    """Convert `trace`, exported by torch's profiler from runs within `step_ranges()`, to a trace of lanes.

    The kernels of a replayed graph are attributed to steps only if the trace also contains a step-by-step run of its
    program. Raises ProfileError if the trace has no step of `programs`.
    """
    found, known = ranges(trace), {program.name: program for program in programs}
    begin = min((each.start for each in found), default=0.0)
    events: list[dict[str, Any]] = []
    inside: set[tuple[str, float]] = set()
    for program in known.values():
        own = [each for each in found if each.name.split(" ", 1)[0] == program.name]
        for where, kernels in _runs(program, own):
            events += _steps(program, where, kernels, begin)
        inside |= {(kernel.name, kernel.start) for each in own for kernel in each.kernels}
    if not events:
        raise ProfileError(f"the trace has no step of {', '.join(known) or 'a program'}; run it within step_ranges()")
    events += _others(trace, inside, begin)
    # times start at the first event, which may be the batcher's: Perfetto drops negative times
    earliest = min(event["ts"] for event in events)
    for event in events:
        event["ts"] = round(event["ts"] - earliest, 3)
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [
            *lane_names("measured"),
            *sorted(events, key=lambda event: (event["tid"], event["ts"], -event["dur"])),
        ],
    }


def _runs(
    program: Program, own: Sequence[Range]
) -> Iterable[tuple[list[Placed], list[list[tuple[str, float, float]]]]]:
    """Yield for each run of the program its steps' times, and their kernels (name, start, end)."""
    by_hand = [each for each in own if STEP_RANGE.fullmatch(each.name)]
    count = len(program.steps)
    for first in range(0, len(by_hand) - count + 1, count):
        run = by_hand[first : first + count]
        spans = [
            (min(k.start for k in each.kernels), max(k.end for k in each.kernels))
            if each.kernels
            else (each.start, each.end)
            for each in run
        ]
        yield [Placed(*where) for where in spans], [[(k.name, k.start, k.end) for k in each.kernels] for each in run]
    captured = [each for each in own if REPLAY_RANGE.fullmatch(each.name) and each.kernels]
    if not captured:
        return
    names = kernels_of_steps(program, own)
    for each, placed in zip(captured, replays(program, captured, names), strict=True):
        origin = min(kernel.start for kernel in each.kernels)
        where = [Placed(origin + place.start, origin + place.end) for place in placed]
        yield where, _kernels_within(program, each, names)


def _kernels_within(
    program: Program, replay: Range, names: Mapping[int, tuple[str, ...]]
) -> list[list[tuple[str, float, float]]]:
    queues: dict[str, list[tuple[str, float, float]]] = {}
    for kernel in replay.kernels:
        queues.setdefault(kernel.name, []).append((kernel.name, kernel.start, kernel.end))
    return [[queues[name].pop(0) for name in names[step.index]] for step in program.steps]


def _steps(
    program: Program, where: Sequence[Placed], kernels: Sequence[Sequence[tuple[str, float, float]]], begin: float
) -> list[dict[str, Any]]:
    """Return bars without overlap: a step that starts early (PDL) is drawn from its predecessor's end, with a note."""
    events = []
    free = {lane: float("-inf") for lane in LANES}
    for step, place, own in zip(program.steps, where, kernels, strict=True):
        start = min(max(place.start, free[step.stream]), place.end)
        about = {
            "program": program.name,
            "step": step.index,
            "name": step.name,
            "launched_early_us": round((start - place.start) * 1e6, 3),
        }
        events.append(span(step.stream, step.op, start - begin, place.end - begin, about))
        for name, first, last in own:
            if last > start:
                about = {"kernel_us": round((last - first) * 1e6, 3)}
                events.append(span(step.stream, name, max(first, start) - begin, last - begin, about))
        free[step.stream] = max(free[step.stream], place.end)
    return events


def _others(trace: Mapping[str, Any], inside: set[tuple[str, float]], begin: float) -> list[dict[str, Any]]:
    """Return copies, kernels between programs (sampling), and the batcher's work."""
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        start, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        if event.get("cat") in KERNEL_CATEGORIES and (event["name"], start) not in inside:
            lane = "main" if event["cat"] == "kernel" else "copies"
            events.append(span(lane, event["name"], start - begin, end - begin, {"outside": "of the programs"}))
        elif event.get("cat") == "user_annotation" and event["name"].startswith(BATCHER):
            events.append(span("batcher", event["name"].removeprefix(BATCHER), start - begin, end - begin, {}))
    return events
