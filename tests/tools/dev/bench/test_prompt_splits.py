"""The bench of prompt attention's splits, without a GPU: its cases and the kernel's choice."""

import pytest
from sidestream.tools.dev.bench.prompt_splits import main


def test_dry_run_lists_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry-run", "--chunks", "32", "512", "--contexts", "2048", "32768"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    chosen = {(int(context), int(chunk)): int(splits) for context, chunk, _, _, _, splits in lines}
    assert chosen[2048, 32] == 4 and chosen[32768, 32] > 8, "at least four steps of 128 keys, on at most 132 SMs"
    assert chosen[2048, 512] == chosen[32768, 512] == 1, "128 tiles are enough programs"
