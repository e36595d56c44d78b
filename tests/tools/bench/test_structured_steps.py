"""The bench of constrained steps next to a simulated device: small, and what it prints adds up."""

import sys

import pytest
from sidestream.runtime.text.structured.mask_filling import fill_threads
from sidestream.tools.dev.bench import structured_steps
from sidestream.tools.dev.bench.structured_steps import main


def test_steps_next_to_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(structured_steps, "OUTPUT", 48)
    threads = fill_threads()
    options = ["--answers", "12", "--step-ms", "2", "--threads", "1", "3", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["structured_steps", *options])
    main()
    title, head, free, *constrained = capsys.readouterr().out.splitlines()
    assert title == "12 answers over 512 tokens, a device whose steps take 2 ms"
    assert head.split()[-5:] == ["mean", "median", "p95", "own", "thread"]
    assert [line.split(" by ")[1][:9].strip() for line in constrained] == ["1 thread", "3 threads"]
    for line in (free, *constrained):
        mean, median, slow, worked = map(float, line.split()[-4:])
        assert mean > 1.9 and median <= slow and 0 < worked < mean
    assert fill_threads() == threads, "as before"
