"""The script that measures the cost model's error runs anywhere, reads its own file back, and holds whole steps
against a bench's figures.
"""

import json
from pathlib import Path

import pytest
from sidestream.tools.dev.bench.cost_error import main
from support.meta_model import config_directory


def test_measuring_and_holding_todays_model_against_an_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_directory(tmp_path / "model") / "config.json"
    common = ["--config", str(config), "--max-loras", "2", "--rank", "16", "--tokens", "1", "4", "--device", "cpu"]
    assert main([*common, "--replays", "1", "-o", str(tmp_path / "first")]) == 0
    shown = capsys.readouterr().out
    assert "a CPU" in shown and "linear_8bit 512x128" in shown and "decode_t4_b4_p8_base" in shown
    content = json.loads((tmp_path / "first.json").read_text())
    assert len(content["results"]) == 4 and all(
        step[2] > 0 for result in content["results"] for step in result["steps"]
    )
    assert main([*common, "--measured", str(tmp_path / "first.json"), "-o", str(tmp_path / "second")]) == 0
    first, second = ((tmp_path / f"{name}.txt").read_text() for name in ("first", "second"))
    assert first == second

    content["results"][0]["steps"].pop()
    (tmp_path / "first.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has other steps"):
        main([*common, "--measured", str(tmp_path / "first.json")])


def test_whole_steps_stand_next_to_what_a_bench_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = json.loads((Path(__file__).parents[4] / "docs" / "measurements" / "bench_latency_h200.json").read_text())
    bench["rows"] = [row for row in bench["rows"] if row["concurrency"] in (1, 64)]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    assert main(["--steps", str(tmp_path / "bench.json"), "--layers", "2", "-o", str(tmp_path / "check")]) == 0
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
