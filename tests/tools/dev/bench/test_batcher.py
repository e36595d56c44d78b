"""The batcher's own bench, small: streams that are all served, and figures that add up."""

import json
import subprocess
import sys

import pytest
from support.serving import write_byte_tokenizer


@pytest.mark.parametrize("more", [[], ["--structured"]])
def test_the_batcher_keeps_up(tmp_path, more):
    write_byte_tokenizer(tmp_path)
    command = [
        sys.executable,
        "-m",
        "sidestream.tools.dev.bench.batcher",
        "--streams",
        "16",
        "--step-ms",
        "10",
        "--seconds",
        "1.5",
        "--prompt",
        "20",
        "--output",
        "60",
        "--tokenizer",
        str(tmp_path / "tokenizer.json"),
        "--json",
        str(tmp_path / "figures.json"),
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert "batcher_ms_per_step" in done.stdout
    assert figures["step_ms"] > 9.9, "the GPU takes its time"
    assert 1 < figures["sequences_per_step"] <= 16
    assert figures["tokens_per_second"] * figures["seconds"] == pytest.approx(
        figures["steps"] * figures["sequences_per_step"], rel=0.2
    )
    assert 0 < figures["batcher_cpu_ms_per_step"] * figures["steps"] < 1000 * figures["seconds"], "one thread of work"
