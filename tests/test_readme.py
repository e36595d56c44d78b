"""The README's runnable examples run, from the repository's root, as a reader would run them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", README, re.DOTALL)


def test_each_way_of_use_has_an_example() -> None:
    assert len(EXAMPLES) == 3
    assert len(re.findall("```python", README)) == len(EXAMPLES), "a Python block is not marked as runnable"


@pytest.mark.parametrize("example", EXAMPLES, ids=["llm", "compile", "torch_compile"])
def test_example_runs(example: str) -> None:
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_relative_links_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page} links to {target}"
