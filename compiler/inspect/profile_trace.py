"""A profiler's trace told in the program's words: lanes main, side, copies and batcher, each step by its op's name
with its real kernels under it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..cost.cost import Placed
from ..program.program import Program
from ..run.ranges import REPLAY_RANGE, STEP_RANGE
from .chrome_trace import LANES, lane_names, span
from .profile import KERNEL_CATEGORIES, ProfileError, Range, kernels_of_steps, ranges, replays

BATCHER = "batcher "  # ranges of the host's work between steps start with this


def lane_trace(trace: Mapping[str, Any], programs: Iterable[Program]) -> dict[str, Any]:
    """`trace` as torch's profiler exported it, of runs within `step_ranges()`, as a trace of lanes.

    A replayed graph's kernels can be told apart when the trace has a step-by-step run of its program too. Raises
    ProfileError when it holds no step of `programs`.
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
        raise ProfileError(
            f"the trace holds no step of {', '.join(known) or 'any program'}; run it within step_ranges()"
        )
    events += _others(trace, inside, begin)
    # the batcher may have been first; Perfetto drops what lies before zero
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
    """For each run of the program: where its steps lay, and their kernels (name, start, end)."""
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
    """Bars of one lane must not overlap: one that was launched early (PDL) starts where its predecessor ends, and
    says by how much it was early.
    """
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
                events.append(
                    span(
                        step.stream,
                        name,
                        max(first, start) - begin,
                        last - begin,
                        {"kernel_us": round((last - first) * 1e6, 3)},
                    )
                )
        free[step.stream] = max(free[step.stream], place.end)
    return events


def _others(trace: Mapping[str, Any], inside: set[tuple[str, float]], begin: float) -> list[dict[str, Any]]:
    """Copies, kernels between programs (sampling), and what the batcher did meanwhile."""
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        start, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        if event.get("cat") in KERNEL_CATEGORIES and (event["name"], start) not in inside:
            events.append(
                span(
                    "main" if event["cat"] == "kernel" else "copies",
                    event["name"],
                    start - begin,
                    end - begin,
                    {"outside": "of the programs"},
                )
            )
        elif event.get("cat") == "user_annotation" and event["name"].startswith(BATCHER):
            events.append(span("batcher", event["name"].removeprefix(BATCHER), start - begin, end - begin, {}))
    return events
