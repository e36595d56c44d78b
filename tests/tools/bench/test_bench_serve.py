"""`sidestream bench serve`: the arithmetic, and whole runs against a small server."""

import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidestream.runtime.protocol import messages as protocol
from sidestream.tools import cli
from sidestream.tools.bench.serving import cold as serve_cold
from sidestream.tools.bench.serving.report import Record, header, line, live_line, longest_gap, summarize
from sidestream.tools.bench.serving.traffic import Planned, log_uniform, plan, poisson_times, zipf_weights
from sidestream.tools.bench.throughput import percentile
from support.serving import GUARD
from support.wire_server import WireServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WireServer]:
    tmp_path.chmod(0o700)
    with WireServer(f"ipc://{tmp_path}/engine.sock") as server:
        yield server


def bench(server: WireServer, target: Path, *arguments: str) -> int:
    return cli.main(
        [
            "bench",
            "serve",
            "--address",
            server.address,
            "--connect-timeout",
            "60",
            "--output-json",
            str(target),
            *arguments,
        ]
    )


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson_times(random.Random(1), 50.0, 100.0, 10**6)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == pytest.approx(5000, abs=5 * 71)  # five deviations
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2), (
        "an exponential's deviation is its mean"
    )
    assert times == sorted(times) and times[-1] < 100
    assert len(poisson_times(random.Random(0), 50.0, 100.0, 7)) == 7


def test_lengths_are_log_uniform_and_within_bounds() -> None:
    source = random.Random(2)
    lengths = [log_uniform(source, 64, 2048) for _ in range(8000)]
    assert min(lengths) >= 64 and max(lengths) <= 2048
    for octave in range(5):  # each doubling gets the same share
        share = sum(64 << octave <= length < 128 << octave for length in lengths) / len(lengths)
        assert share == pytest.approx(0.2, abs=0.03)
    assert {log_uniform(source, 5, 5) for _ in range(9)} == {5}


def test_popularity_falls_as_one_over_the_rank() -> None:
    weights = zipf_weights(200)
    assert sum(weights) == pytest.approx(1) and weights[0] / weights[9] == pytest.approx(10)
    names = [f"a{rank}" for rank in range(200)]
    planned = plan(100.0, 100.0, 10**6, (64, 2048), (16, 512), names, seed=3)
    counts = Counter(request.adapter for request in planned)
    assert counts["a0"] / len(planned) == pytest.approx(weights[0], abs=0.03)
    assert counts["a0"] > counts["a20"]


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    arguments = (5.0, 10.0, 1000, (64, 128), (16, 32), ["x", "y"])
    first, again, other = (plan(*arguments, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert first[0].prompt(97) == again[0].prompt(97) != first[1].prompt(97)
    assert all(len(request.prompt(97)) == request.input_len and max(request.prompt(97)) < 97 for request in first)
    assert {request.adapter for request in plan(5.0, 10.0, 1000, (1, 2), (1, 2), [], seed=0)} == {None}


def test_percentiles() -> None:
    assert [percentile([3, 1, 2, 4], share) for share in (0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 2, 3, 4, 4]
    assert math.isnan(percentile([], 0.5))


def record(planned: float, chunks: list[tuple[float, int]], wanted: int, error: str | None = None) -> Record:
    made = Record(planned=planned, sent=planned + 0.001, wanted=wanted)
    for moment, tokens in chunks:
        made.arrived(moment, tokens)
    made.finished, made.error = made.tokens == wanted, error
    return made


def test_figures() -> None:
    records = [
        record(0.0, [(0.1, 1), (0.2, 1), (0.4, 2)], 4),
        record(1.0, [(4.0, 1), (4.1, 1)], 2),  # too late
        record(2.0, [(2.1, 1), (2.2, 0), (4.1, 1)], 2),  # too slow, with one stall
        record(3.0, [(3.1, 1)], 5, "not_finished"),
        record(4.0, [], 5, "overloaded"),
    ]
    figures = summarize(
        records,
        10.0,
        slo_ttft=1.0,
        slo_gap=0.15,
        stall=1.0,
        before={"adapter_hits_total": 10, "adapter_misses_total": 1},
        after={"adapter_hits_total": 13, "adapter_misses_total": 2, "preemptions_total": 4},
    )
    assert (figures["requests"], figures["complete"], figures["errors"]) == (5, 3, {"not_finished": 1, "overloaded": 1})
    assert figures["goodput_per_s"] == pytest.approx(0.1) and figures["goodput_share"] == pytest.approx(0.2)
    assert figures["output_tokens_per_s"] == pytest.approx(0.9)
    assert figures["ttft_ms"]["p50"] == pytest.approx(100) and figures["ttft_ms"]["p99"] == pytest.approx(3000), (
        "counted from when it was due"
    )
    assert figures["inter_token_ms"]["p50"] == pytest.approx(100) and figures["inter_token_ms"]["p99"] == pytest.approx(
        2000
    )
    assert figures["stalls"] == 1 and figures["longest_gap_ms"] == pytest.approx(2000)
    assert figures["adapter_hit_rate"] == pytest.approx(0.75) and figures["preemptions"] == 4
    assert figures["sender_late_p99_ms"] == pytest.approx(1)
    assert len(line(2.0, figures)) >= len(header()) and "75%" in line(2.0, figures)
    empty = summarize([record(0.0, [], 5, "engine_dead")], 1.0, 1.0, 1.0, 1.0, {}, {})
    assert empty["adapter_hit_rate"] is None and "nan" not in line(1.0, empty)
    shown = live_line(records, 5.0)
    assert "sent 5/5" in shown and "done 3" in shown and "failed 2" in shown


def test_the_longest_gap_in_a_window() -> None:
    streams = [[0.0, 1.0, 1.1, 5.0], [0.0, 0.9, 1.8, 2.7, 3.6], []]
    assert longest_gap(streams, 1.0, 2.0) == pytest.approx(0.9)
    assert longest_gap(streams, 1.1, 1.2) == pytest.approx(0.1), "a gap counts only as far as it lies in the window"
    assert longest_gap([], 0.0, 1.0) == 0


def test_traffic_end_to_end(server: WireServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "serve.json"
    arguments = (
        "--rate",
        "40",
        "80",
        "--duration",
        "0.5",
        "--input-len",
        "2",
        "8",
        "--output-len",
        "3",
        "6",
        "--num-adapters",
        "5",
    )
    assert bench(server, target, *arguments) == 0
    found = json.loads(target.read_text())
    assert [row["rate"] for row in found["rows"]] == [40, 80] and found["workload"] == "S"
    for row in found["rows"]:
        assert row["requests"] == row["complete"] > 5 and not row["errors"]
        assert row["goodput_per_s"] == pytest.approx(row["complete"] / row["seconds"])
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] < 1000 * row["seconds"]
    assert {message.adapter for message in server.submits} == {"pirate", "shout"}
    assert all(
        message.sampling.ignore_eos and 2 <= len(message.prompt_token_ids or []) <= 8 for message in server.submits
    )
    shown = capsys.readouterr().out
    assert "TTFT" in shown and "goodput" in shown and str(target) in shown
    assert server.address not in target.read_text(), "results can be published"


def test_errors_are_counted_and_the_run_goes_on(
    server: WireServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(message: protocol.Submit) -> protocol.Error | None:
        return (
            protocol.Error(code="overloaded", message="later", request_id=message.request_id)
            if len(server.submits) % 2
            else None
        )

    server.refuse = refuse
    target = tmp_path / "serve.json"
    assert (
        bench(server, target, "--rate", "40", "--duration", "0.5", "--input-len", "2", "8", "--output-len", "3", "6")
        == 0
    )
    (row,) = json.loads(target.read_text())["rows"]
    assert row["errors"]["overloaded"] + row["complete"] == row["requests"] and row["complete"] > 0
    assert "x overloaded" in capsys.readouterr().out


def test_a_server_that_does_not_finish_ends_the_bench_in_time(server: WireServer, tmp_path: Path) -> None:
    server.hold = True
    target = tmp_path / "serve.json"
    assert (
        bench(
            server,
            target,
            "--rate",
            "40",
            "--duration",
            "0.3",
            "--drain",
            "0.3",
            "--input-len",
            "2",
            "8",
            "--output-len",
            "3",
            "6",
        )
        == 1
    )
    (row,) = json.loads(target.read_text())["rows"]
    assert row["errors"] == {"not_finished": row["requests"]}
    until = time.monotonic() + GUARD
    while len(server.aborts) < len(server.submits):
        assert time.monotonic() < until, "what was sent is aborted"
        time.sleep(0.01)
    assert server.submits


def test_adapters_of_a_folder_are_registered(server: WireServer, tmp_path: Path) -> None:
    for name in ("one", "two", "pirate"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    arguments = (
        "--rate",
        "20",
        "--duration",
        "0.3",
        "--input-len",
        "2",
        "8",
        "--output-len",
        "1",
        "2",
        "--adapter-dir",
        str(tmp_path / "adapters"),
    )
    assert bench(server, tmp_path / "out.json", *arguments) == 0
    assert [message.name for message in server.calls if isinstance(message, protocol.LoadAdapter)] == ["one", "two"]


def test_cold_starts_end_to_end(
    server: WireServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_cold, "SETTLE_SECONDS", 0.02)
    target = tmp_path / "cold.json"
    assert bench(server, target, "--workload", "C", "--background", "3", "--repeats", "2") == 0
    rows = json.loads(target.read_text())["rows"]
    assert [(row["adapter"], row["samples"]) for row in rows] == [("resident", 2), ("disk", 2)]
    assert rows[0]["cold_start_ms"] == 0 and rows[1]["ttft_ms"] > 0
    shown = capsys.readouterr().out
    assert "no adapter was found in: host memory" in shown and "cold start" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--input-len", "9", "3"], "lower bound"),
        (["--rate", "0"], "above 0"),
        (["--output-json", "no/such/folder/x.json"], "existing directory"),
        (["--adapter-dir", "no/such/folder"], "not a directory"),
        (["--input-len", "64", "9999"], "the server accepts 4096"),
        (["--num-requests", "1000000"], "at most"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    server: WireServer, tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = bench(server, tmp_path / "x.json", *arguments)
    except SystemExit as leave:
        code = int(leave.code or 0)
    assert code == 2 and said in capsys.readouterr().err
    assert not server.submits


def test_a_planned_request_is_plain_data() -> None:
    assert Planned(0.0, 3, 4, None, 5).prompt(2) == Planned(0.0, 3, 4, "x", 5).prompt(2)
