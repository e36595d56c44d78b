"""docs/speculation.md: its example runs, and drafts are accepted in it."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "speculation.md").read_text()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "speculation.md", "exec"), {})
    drafted, accepted = map(int, capsys.readouterr().out.split()[-2:])
    assert 0 < accepted < drafted
