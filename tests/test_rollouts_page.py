"""docs/rollouts.md: its examples run on the demo model and print what the page shows."""

import re
import shutil
from pathlib import Path

import pytest
from sidestream.runtime.demo_model import DEMO_MODEL

from .test_train_page import run

PAGE = (Path(__file__).parents[1] / "docs" / "rollouts.md").read_text()
EXAMPLES = re.findall(r"<!-- runnable -->\n```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL)


@pytest.mark.parametrize(("code", "shown"), EXAMPLES)
def test_the_examples_print_what_the_page_shows(tmp_path: Path, code: str, shown: str) -> None:
    pytest.importorskip("peft")
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "llama")
    printed = run(tmp_path, "-c", f"import torch\ntorch.set_num_threads(1)\n{code}")
    assert printed.strip().endswith(shown.strip())


def test_the_page_has_examples() -> None:
    assert EXAMPLES
