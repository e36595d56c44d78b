"""The cost model's whole steps next to a bench's figures."""

import json
from pathlib import Path

import pytest
from sidestream.tools.dev.bench.cost_error import main


def test_whole_steps_stand_next_to_what_a_bench_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = json.loads((Path(__file__).parents[4] / "docs" / "measurements" / "bench_latency_h200.json").read_text())
    bench["rows"] = [row for row in bench["rows"] if row["concurrency"] in (1, 64)]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    assert main([str(tmp_path / "bench.json"), "--layers", "2", "-o", str(tmp_path / "check")]) == 0
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "check.json").read_text())
    assert [(row["lora"], row["concurrency"]) for row in rows] == [
        (row["lora"], row["concurrency"]) for row in bench["rows"]
    ]
    assert [row["measured"] for row in rows] == [row["ms_per_step"] for row in bench["rows"]]
    assert all(0.05 < row["estimated"] < row["measured"] and row["kernels"] > 5 for row in rows), (
        "two layers take a part of what 32 take"
    )
    assert rows[0]["estimated"] < rows[2]["estimated"], "adapters cost something"
    assert "272 cached tokens" in shown and "NVIDIA H200" in shown and f"{rows[0]['measured']:.3f}" in shown
