"""Traces for Perfetto: the format's rules, lanes, order, arrows; estimated ones, profiled ones in the program's
words, and those that are published.
"""

import gzip
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.compiler.inspect.chrome_trace import LANES, lane_trace, trace
from sidestream.compiler.inspect.profile import ProfileError
from sidestream.compiler.run.profiler_ranges import SWITCH, named, ranged, replay_range, step_range, step_ranges
from support import profiles
from support.meta_model import DECODE, compiled_llama


def bars(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if event["ph"] == "X"]


def check_nesting(content: dict[str, Any]) -> None:
    """In each lane a bar lies within another or apart from it, never across its end: Perfetto would draw it wrong."""
    lanes = defaultdict(list)
    for bar in bars(content):
        lanes[bar["tid"]].append((bar["ts"], bar["ts"] + bar["dur"]))
    for lane in lanes.values():
        open_until: list[float] = []
        for start, end in sorted(lane, key=lambda bar: (bar[0], -bar[1])):
            while open_until and open_until[-1] <= start + 1e-4:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-4
            open_until.append(end)


def check_format(content: dict[str, Any]) -> None:
    """Chrome's trace event format, as far as viewers insist: required fields by phase, finite times, flows in pairs
    that begin and end inside bars.
    """
    assert json.loads(json.dumps(content, allow_nan=False)) == content and isinstance(content["traceEvents"], list)
    flows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in content["traceEvents"]:
        assert (
            event["ph"] in ("X", "M", "s", "f") and isinstance(event["name"], str) and isinstance(event["pid"], int)
        ), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index") and event["args"], event
            continue
        assert isinstance(event["tid"], int) and math.isfinite(event["ts"]) and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert math.isfinite(event["dur"]) and event["dur"] >= 0, event
        else:
            assert isinstance(event["id"], int), "Perfetto drops an arrow whose id is no number"
            flows[event["cat"], event["name"], event["id"]].append(event)
    for own in flows.values():
        assert Counter(event["ph"] for event in own) == {"s": 1, "f": 1}, own
        start, end = sorted(own, key=lambda event: event["ph"], reverse=True)
        assert start["ts"] <= end["ts"] + 2e-3 and end["bp"] == "e"
        for event in own:
            inside = [
                bar
                for bar in bars(content)
                if bar["tid"] == event["tid"] and bar["ts"] - 2e-3 <= event["ts"] <= bar["ts"] + bar["dur"] + 2e-3
            ]
            assert inside, f"an arrow ends in no bar: {event}"


def lanes_of(content: dict[str, Any]) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in content["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


@pytest.mark.parametrize("kind", ["estimate", "profile", "dump"])
def test_every_trace_keeps_the_formats_rules(kind: str, tmp_path: Path) -> None:
    if kind == "profile":
        content = lane_trace(profiles.trace(profiles.REPLAY), [profiles.program()])
    elif kind == "estimate":
        content = trace(compiled_llama().program(DECODE))
    else:
        content = json.loads((compiled_llama().dump(tmp_path, [DECODE]) / "trace.json").read_text())
    check_format(content)
    check_nesting(content)
    assert lanes_of(content) == {1: "main stream", 2: "side stream", 3: "copies", 4: "batcher"}
    assert {bar["tid"] for bar in bars(content)} == {1, 2, 3, 4}, "something happens in every lane"


@pytest.mark.parametrize("name", ["workload_g_h200_trace", "workload_g_h200_trace_lora"])
def test_published_traces_of_real_kernels_keep_the_formats_rules(name: str) -> None:
    path = Path(__file__).parents[3] / "docs" / "measurements" / f"{name}.json.gz"
    content = json.loads(gzip.decompress(path.read_bytes()))
    check_format(content)
    kernels = Counter(event["name"] for event in content["traceEvents"] if event.get("cat") == "kernel")
    assert kernels["decode_kernel"] > 90 and kernels["_rms_norm_kernel"] > 180
    assert any(name.startswith(("nvjet_sm90", "_linear_int8_large")) for name in kernels), (
        "cuBLAS's GEMM in e4m3, our own in int8"
    )


def test_the_estimate_has_four_lanes_with_every_step_and_wait() -> None:
    program = compiled_llama().program(DECODE)
    content = trace(program)
    names = {event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"main stream", "side stream", "copies", "batcher"}
    spans = {bar["args"]["step"]: bar for bar in bars(content) if "step" in bar["args"]}
    assert [spans[step.index]["name"] for step in program.steps] == [step.op for step in program.steps]
    for step in program.steps:
        bar = spans[step.index]
        assert bar["tid"] == LANES[step.stream] and bar["dur"] > 0
        assert all(bar["ts"] >= spans[wait]["ts"] + spans[wait]["dur"] - 2e-3 for wait in step.waits)
    arrows = [event for event in content["traceEvents"] if event["ph"] in "sf"]
    assert len(arrows) == 2 * sum(len(step.waits) for step in program.steps) > 0
    copies = [bar for bar in bars(content) if bar["tid"] == LANES["copies"]]
    assert copies[0]["ts"] == 0 and copies[0]["dur"] <= min(bar["ts"] for bar in spans.values()) + 1e-3
    assert copies[1]["ts"] >= max(bar["ts"] + bar["dur"] for bar in spans.values()) - 1e-3
    check_nesting(content)


def test_a_profile_shows_steps_with_their_kernels_copies_and_the_batcher() -> None:
    content = lane_trace(profiles.trace(profiles.REPLAY), [profiles.program()])
    check_nesting(content)
    main = [bar["name"] for bar in bars(content) if bar["tid"] == LANES["main"]]
    # two norms in a step-by-step run and in two replays
    assert main.count("aten.b.default") == 6 and main.count("norm") == 6
    assert "elsewhere" in main, "a kernel outside the programs is not lost"
    side = [bar for bar in bars(content) if bar["tid"] == LANES["side"]]
    assert [bar["name"] for bar in side if bar["ts"] > side[-1]["ts"] - 20] == [
        "aten.a.default",
        "plan",
        "aten.c.default",
        "shrink",
        "merge",
    ]
    assert [bar["name"] for bar in bars(content) if bar["tid"] == LANES["copies"]] == ["Memcpy HtoD"]
    assert [bar["name"] for bar in bars(content) if bar["tid"] == LANES["batcher"]] == ["schedule"]
    early = [bar for bar in bars(content) if bar["args"].get("step") == 4][-1]
    assert early["args"]["launched_early_us"] == pytest.approx(1.0), (
        "it was launched a microsecond before its predecessor had ended"
    )


def test_a_profile_without_the_programs_is_refused() -> None:
    with pytest.raises(ProfileError, match="no step of program"):
        lane_trace({"traceEvents": []}, [profiles.program()])


def test_ranges_name_steps_only_while_they_are_on() -> None:
    program, calls = compiled_llama().program(DECODE), []
    assert (
        step_range(program, program.steps[3]) == f"{program.name} step 3 {program.steps[3].op}"
        and replay_range(program) == f"{program.name} replay"
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with step_ranges() as recording:
            assert SWITCH.recording is recording
            with pytest.raises(RuntimeError, match="on already"), step_ranges():
                pass
            ranged("outer step 1 x", lambda: calls.append(1))()
            with named("inner"):
                calls.append(2)
        assert SWITCH.recording is None
    assert calls == [1, 2] and {"outer step 1 x", "inner"} <= {event.name for event in profiler.events()}
