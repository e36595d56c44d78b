"""`sidestream bench http` counts what the server's own counters count."""

import argparse
import json
import os
from array import array
from pathlib import Path
from typing import Any

import pytest
from sidestream.tools import cli
from sidestream.tools.bench.random_model import TINY
from sidestream.tools.bench.serving import http
from sidestream.tools.bench.serving.closed_loop import Answer, Load, summarize

TRIES = 5


def load(**changes: object) -> Load:
    fields = {"url": "", "streams": 1, "place": 0, "all_streams": 1, "prompt_len": 1, "output_len": 4}
    fields |= {"vocabulary": 9, "model": "", "adapters": [], "seed": 0, "begin": 10.0, "end": 20.0}
    return Load(**fields | changes)  # type: ignore[arg-type]


def test_tokens_of_clients_are_those_that_the_server_made(
    served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    place = ["--engine", served.address, "--http", served.url, "--output-json", str(file)]
    sizes = ["--concurrency", "3", "--input-len", "8", "--output-len", "12", "--processes", "2"]
    command = ["bench", "http", *place, *sizes, "--seconds", "1", "--rounds", "1", "--num-adapters", "0"]
    for _ in range(TRIES):  # a busy machine may ask the server late for its counters
        assert cli.main(command) == 0
        ((zeromq, over_http),) = json.loads(file.read_text())["workloads"]["base"]["pairs"]
        made = [figures["engine_steps"] * figures["engine_sequences_per_step"] for figures in (zeromq, over_http)]
        if [zeromq["tokens_per_s"], over_http["tokens_per_s"]] == pytest.approx(made, rel=0.35):
            break
    else:
        raise AssertionError(f"in its one second, but for the edges: {made}, {zeromq}, {over_http}")
    for figures in (zeromq, over_http):
        assert 0 < figures["first_p50_ms"] <= figures["first_p99_ms"]
    assert "HTTP has" in capsys.readouterr().out


def test_a_shape_is_served_with_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    parser = argparse.ArgumentParser()
    http.add_parser(parser.add_subparsers())
    shape = ["--shape", str(tmp_path / "config.json")]
    options = parser.parse_args(["http", *shape, "--num-adapters", "2", "--lora-rank", "4"])
    model, *rest = http.model_arguments(options, tmp_path)
    assert json.loads((Path(model) / "config.json").read_text())["hidden_size"] == TINY["hidden_size"]
    assert rest[:4] == ["--load-format", "dummy", "--max-loras", "2"]
    adapters = [Path(each.partition("=")[2]) for each in rest[5:7]]
    assert all((folder / "adapter_config.json").is_file() for folder in adapters)
    with pytest.raises(ValueError, match="two models"):
        http.model_arguments(parser.parse_args(["http", "demo", *shape]), tmp_path)


def test_what_lies_in_the_window_counts() -> None:
    answers = [
        (Answer(5.0, array("d", [9.0, 12.0])), 4),  # half of its four tokens
        (Answer(11.0, array("d", [14.0, 15.0, 21.0])), 3),
        (Answer(20.5, array("d", [21.0])), 1),
    ]
    figures = summarize(answers, load(), 0.5, [])
    assert (figures.tokens, figures.requests, figures.first_tokens) == (4.0, 1, [3.0])
    assert figures.gaps == [1.0, 6.0], "a gap belongs to the moment at which it began"


def test_threads_of_a_core_are_on_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(http, "siblings", lambda cpu: f"{cpu % 6},{cpu % 6 + 6}")
    assert http.split_cores(2) == ([0, 6, 1, 7, 2, 8, 3, 9], [4, 10, 5, 11])
    assert http.split_cores(3) is None, "three cores are few for a server"
