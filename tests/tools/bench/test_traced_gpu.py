"""Pauses between steps are counted as what they are, and a trace is written once."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from sidestream.tools.bench.serving import traced_gpu
from sidestream.tools.bench.serving.traced_gpu import TracedRunner, between_events, idle_figures


def event(first: float, microseconds: float, category: str = "kernel"):
    return {"cat": category, "ts": first, "dur": microseconds}


def test_only_long_pauses_of_the_device_are_idle():
    events = [
        event(0, 10),
        event(11, 9),
        event(5, 10, "gpu_memcpy"),
        event(30, 10),
        event(0, 1000, "cpu_op"),
        {"cat": "kernel", "ts": 3},
        event(41, 9),
    ]
    figures = idle_figures(events, 2)
    assert figures["device_events"] == 5 and figures["step_us"] == 25
    assert (
        figures["idle_us_per_step"] == 5
        and figures["idle_share"] == pytest.approx(0.2)
        and figures["longest_pause_us"] == 10
    )
    assert figures["kernel_boundaries_us_per_step"] == pytest.approx(0.5)
    assert idle_figures([event(0, 5, "cpu_op")], 2) == {"device_events": 0}


def test_steps_between_events():
    figures = between_events([(0.0, 1.0), (1.01, 2.0), (1.999, 3.0)])
    assert (
        figures["steps"] == 3
        and figures["step_us"] == pytest.approx(1000)
        and figures["longest_pause_us"] == pytest.approx(10)
    )
    assert figures["idle_us_per_step"] == pytest.approx(5) and figures["idle_share"] == pytest.approx(10 / 3000)


def test_decode_steps_are_traced_into_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(traced_gpu, "WARM_UP_STEPS", 3)
    monkeypatch.setattr(traced_gpu, "TIMED_STEPS", 3)
    monkeypatch.setattr(traced_gpu, "TRACED_STEPS", 4)
    seen = []
    inner = SimpleNamespace(
        submit=lambda plan: (seen.append(plan.step), torch.ones(3) + 1)[1], collect=lambda handle: handle
    )
    runner = TracedRunner(inner, tmp_path / "trace.json")
    for step in range(16):
        runner.submit(SimpleNamespace(step=step, decode=step % 4 != 0, num_tokens=1, num_sequences=5, uses_lora=False))
    assert seen == list(range(16)) and runner.collect(7) == 7
    figures = tmp_path / "trace.figures.json"
    end = time.monotonic() + 60
    while not (figures.exists() and figures.read_text().endswith("\n")) and time.monotonic() < end:
        time.sleep(0.05)
    assert json.loads(figures.read_text())["sequences"] == [5]
    names = [entry.get("name", "") for entry in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert sum(name.startswith("step ") for name in names) == 6, "four decode steps, and the two prompts' among them"
