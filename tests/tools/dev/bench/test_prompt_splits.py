"""The benches of prompt attention's splits (without a GPU: cases, the kernel's choice) and of shared prefixes."""

import json
from pathlib import Path

import pytest
from sidestream.tools.bench.random_model import TINY
from sidestream.tools.dev.bench import prompt_splits, shared_prefix_steps


def test_dry_run_lists_every_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    prompt_splits.main(["--dry-run", "--chunks", "32", "512", "--contexts", "2048", "32768"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    chosen = {(int(context), int(chunk)): int(splits) for context, chunk, _, _, _, splits in lines}
    assert chosen[2048, 32] == 4 and chosen[32768, 32] > 8, "at least four steps of 128 keys, on at most 132 SMs"
    assert chosen[2048, 512] == chosen[32768, 512] == 1, "128 tiles are enough programs"


def test_steps_are_timed_with_and_without_a_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    few = ["--requests", "3", "--shared", "64", "--own", "8", "--tokens", "4"]
    shared_prefix_steps.main(["--shape", str(config), "--device", "cpu", *few])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[:2] for line in lines] == [["0", "False"], ["64", "False"], ["0", "True"], ["64", "True"]]
    assert all(float(line[2]) > 0 and line[4] == "0" for line in lines), "a CPU has no such programs"
