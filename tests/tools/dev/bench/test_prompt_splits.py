"""The benches of prompt attention's splits and of shared prefixes, without a GPU: their cases, the kernel's choice."""

import pytest
from sidestream.tools.dev.bench import prompt_splits, shared_prefix


def test_dry_run_lists_every_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    prompt_splits.main(["--dry-run", "--chunks", "32", "512", "--contexts", "2048", "32768"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    chosen = {(int(context), int(chunk)): int(splits) for context, chunk, _, _, _, splits in lines}
    assert chosen[2048, 32] == 4 and chosen[32768, 32] > 8, "at least four steps of 128 keys, on at most 132 SMs"
    assert chosen[2048, 512] == chosen[32768, 512] == 1, "128 tiles are enough programs"


def test_dry_run_lists_every_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    shared_prefix.main(["--dry-run", "--requests", "64", "256", "--shared", "1024"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [["64", "1024", "256"], ["256", "1024", "256"]]
