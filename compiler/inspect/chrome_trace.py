"""A program's schedule for Perfetto (Chrome's trace format): lanes main, side, copies and batcher, waits as arrows;
estimated, or with measured steps.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from ..cost.cost import Placed, estimate, step_bytes, total_seconds
from ..cost.hardware import H200, Gpu
from ..cost.work import DEFAULT, Assumptions, link_bytes
from ..program.program import Program

LANES = {"main": 1, "side": 2, "copies": 3, "batcher": 4}


def trace(
    program: Program, placed: Sequence[Placed] | None = None, *, assume: Assumptions = DEFAULT, gpu: Gpu = H200
) -> dict[str, Any]:
    """One decode or prefill step as Perfetto shows it.

    `placed`: where each step lies on the time axis (default: the estimate). The inputs are copied before the first step
    and what comes back is copied after the last; the batcher has the time between to plan the next step.
    """
    timing = estimate(program, assume, gpu) if placed is None else placed
    origin = "estimate" if placed is None else "measured"
    arrive, leave = _copies(program, gpu)
    shift, total = arrive, total_seconds(timing)
    events = lane_names(f"{program.name} ({origin})")
    events.append(span("copies", "inputs to the GPU", 0.0, arrive, {"bytes": input_bytes(program)}))
    events.append(span("batcher", "plans the next step (this long at most)", shift, shift + total, {}))
    flows = count(1)  # Perfetto takes nothing but numbers
    for step, where in zip(program.steps, timing, strict=True):
        about = {"step": step.index, "name": step.name, "bytes": step_bytes(program, step, assume)}
        if link_bytes(program, step):
            about["nvlink_bytes"] = link_bytes(program, step)
        arguments = {**about, "sm_budget": step.sm_budget, "pdl": step.pdl, "waits": list(step.waits)}
        events.append(span(step.stream, step.op, shift + where.start, shift + where.end, arguments))
        for wait in step.waits:
            flow = {"cat": "wait", "name": "wait", "id": next(flows), "pid": 1}
            events.append(
                {
                    "ph": "s",
                    **flow,
                    "tid": LANES[program.steps[wait].stream],
                    "ts": microseconds(shift + timing[wait].end - 1e-9),
                }
            )
            events.append(
                {"ph": "f", "bp": "e", **flow, "tid": LANES[step.stream], "ts": microseconds(shift + where.start)}
            )
    events.append(span("copies", "sampled tokens to the host", shift + total, shift + total + leave, {}))
    return {"displayTimeUnit": "ns", "traceEvents": events}


def lane_names(process: str, lanes: Mapping[str, int] = LANES, pid: int = 1) -> list[dict[str, Any]]:
    """The events that name a process and its lanes, and keep the lanes in this order."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}]
    for lane, thread in lanes.items():
        label = f"{lane} stream" if lane in ("main", "side") else lane
        events.append({"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": label}})
        events.append(
            {"ph": "M", "pid": pid, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
        )
    return events


def span(lane: str, name: str, start: float, end: float, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A bar from `start` to `end` (seconds); both are rounded, not the length, so that what touches does not
    overlap.
    """
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
    """As traces count time, to the nanosecond."""
    return round(seconds * 1e6, 3)


def input_bytes(program: Program) -> int:
    """Bytes that change at each step and come from the host: token ids, positions, slots, block tables."""
    return sum(
        buffer.nbytes for buffer in program.of_kind("input") if not buffer.name.startswith(("kv_cache", "kv_scale"))
    )


def _copies(program: Program, gpu: Gpu) -> tuple[float, float]:
    """Estimated seconds of the copies to the GPU and back."""
    rows = program.bucket.sequences if program.bucket is not None else 1
    return gpu.copy_latency + input_bytes(program) / (gpu.copy_gbs * 1e9), gpu.copy_latency + 4 * rows / (
        gpu.copy_gbs * 1e9
    )
