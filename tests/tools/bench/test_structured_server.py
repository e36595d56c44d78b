"""The bench of constrained answers through a server: a small one, and what it prints adds up."""

import pytest
from sidestream.tools.dev.bench.structured_server import main


def test_steps_of_a_server(capfd: pytest.CaptureFixture[str]) -> None:
    main(["--answers", "3", "--short", "4", "--long", "8", "--repeats", "2", "--", "--max-model-len", "256"])
    printed, told = capfd.readouterr()
    title, head, *rows = printed.splitlines()
    assert title == "3 answers over 512 tokens, at once through a server"
    assert head.split()[-3:] == ["median", "least", "most"]
    assert [row[:22].strip() for row in rows] == ["without constraints", "with a constraint"]
    for row in rows:
        median, least, most = map(float, row.split()[-3:])
        assert least <= median <= most
    assert "256 tokens each" in told, "the server has the options that are not the bench's"


def test_answers_that_are_too_short_are_told() -> None:
    arguments = ["--answers", "1", "--short", "200", "--long", "201", "--", "--max-model-len", "256"]
    with pytest.raises(RuntimeError, match="an answer has not the 200 tokens that were asked for"):
        main(arguments)
