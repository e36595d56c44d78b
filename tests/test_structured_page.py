"""docs/structured_outputs.md: its example runs, and says what it should."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "structured_outputs.md").read_text()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "structured_outputs.md", "exec"), {})
    assert re.search(r"dict_keys\(\['city', 'size'\]\) (yes|no)\n$", capsys.readouterr().out)
