"""The bench of a step's work on the host."""

import pytest
from sidestream.tools.dev.bench.drafts import host_work


def test_the_table_of_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--device", "cpu", "--output-len", "8", "--concurrency", "1", "--drafts", "1"]
    assert host_work.main(few) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[-3:] == ["start", "wait", "step"]
    assert [row[:3] for row in rows] == [[each, kind, "1"] for each in ("off", "1") for kind in ("greedy", "drawn")]
    for row in rows:
        assert len(row) == 6 and all(float(cell) > 0 for cell in row[3:])
