"""`sidestream tune`: what it would measure, how it chooses, and the table that it writes."""
import json
from pathlib import Path

import pytest
import torch
from sidestream.ops import tuning
from sidestream.ops.tuning import LinearConfig
from sidestream.tools import cli
from sidestream.tools.engine_arguments import DEMO_MODEL
from sidestream.tools.tune import Job, Timing, choose, put, write


def test_a_dry_run_lists_the_shapes_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "gate_up  [28672, 4096] x 256" in shown and "lm_head  [128256, 4096] x 16" in shown and "minute" in shown
    assert cli.main(["tune", str(DEMO_MODEL), "--dry-run", "--layers", "down", "--tokens", "100", "128", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    shape = f"[{config['hidden_size']}, {config['intermediate_size']}]"
    assert [line.split(" configurations")[0].split()[:-1] for line in lines[:-1]] == [f"down  {shape} x {tokens}".split() for tokens in (16, 128)]


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", str(tmp_path), "--dry-run"]) == 2
    assert "config.json" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["tune"]) == 2
        assert "--dry-run" in capsys.readouterr().err


def test_of_equally_fast_ones_the_most_exact_is_chosen() -> None:
    fast, exact, slow = (LinearConfig("wide", promote=promote) for promote in (0, 4, 2))
    measured = [Timing(fast, 10.0, 2.5e-3), Timing(exact, 10.2, 1.7e-3), Timing(slow, 11.0, 1.6e-3)]
    assert choose(measured).config is exact


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, job = tmp_path / "table.json", Job("down", 4096, 14336, 128)
    first, second = tuning.wide_config(128, 64, 2, promote=4), LinearConfig("gluon", 64, 32, stages=8, ctas=128, split=True, max_registers=72)
    table = {"device": "NVIDIA H200", "model": "m", "linear_fp8": []}
    put(table, "linear_fp8", job, first)
    put(table, "linear_fp8", Job("down", 4096, 14336, 32), second)
    put(table, "linear_fp8", Job("lm_head", 128256, 4096, 128), LinearConfig("scaled_mm"))
    put(table, "linear_fp8_silu_mul", job, second)
    put(table, "linear_fp8_silu_mul", job, None)
    write(path, table)
    assert tuning.read_table(path, "linear_fp8") == {
        (4096, 14336, 32): second, (4096, 14336, 128): first, (128256, 4096, 128): LinearConfig("scaled_mm"),
    }  # fmt: skip
    assert tuning.read_table(path, "linear_fp8_silu_mul") == {} and json.loads(path.read_text())["device"] == "NVIDIA H200"


def test_the_packages_table_is_written_as_tune_writes_it(tmp_path: Path) -> None:
    write(tmp_path / "again.json", json.loads(tuning.TUNED.read_text()))
    assert (tmp_path / "again.json").read_text() == tuning.TUNED.read_text()
