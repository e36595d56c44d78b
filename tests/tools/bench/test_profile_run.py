"""`bench latency --profile` writes a trace of the engine's programs by the names of their steps."""

import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from sidestream.compiler.inspect.chrome_trace import LANES
from sidestream.tools import cli
from sidestream.tools.bench import latency
from sidestream.tools.bench.profile_run import name_batcher
from support.tiny import tiny_llama


def test_bench_latency_writes_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the thread's own: what else this machine does is no part of a step."""
    monkeypatch.setattr(latency, "measure", partial(latency.measure, clock=time.thread_time))
    model, target = tiny_llama(tmp_path, tokenizer=True).path, tmp_path / "profile.json"
    sizes = {"concurrency": 2, "input-len": 8, "output-len": 96, "num-iters": 1, "num-adapters": 2, "lora-rank": 4}
    arguments = ["--lora", "four", *(text for name, value in sizes.items() for text in (f"--{name}", str(value)))]
    places = ["--model", str(model), "--output-json", str(tmp_path / "latency.json"), "--profile", str(target)]
    assert cli.main(["bench", "latency", *places, *arguments]) == 0
    assert str(target) in capsys.readouterr().out
    bars = [event for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"]
    lanes = {lane: {bar["name"] for bar in bars if bar["tid"] == number} for lane, number in LANES.items()}
    assert {"sidestream.linear_8bit", "sidestream.rope_append"} <= lanes["main"] and "sidestream.lora_shrink" in lanes[
        "side"
    ]
    assert lanes["batcher"] == {"schedule", "commit"}
    programs = {bar["args"]["program"] for bar in bars if "program" in bar["args"]}
    assert any(name.startswith("decode_t2") for name in programs)


def test_the_batchers_names_are_taken_away_again() -> None:
    class Scheduler:
        def schedule(self) -> str:
            return "plan"

        def commit(self, result: int) -> int:
            return result + 1

    scheduler = Scheduler()
    restore = name_batcher(scheduler)
    assert scheduler.schedule() == "plan" and scheduler.commit(2) == 3 and "schedule" in vars(scheduler)
    restore()
    assert not vars(scheduler)
    with pytest.raises(AttributeError):
        name_batcher(SimpleNamespace())
