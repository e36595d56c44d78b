"""docs/rollouts.md: its examples run on the demo model; the ratio is exactly 1 before each first update."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from sidestream.runtime.demo_model import DEMO_MODEL

from .test_train_page import run

PAGE = (Path(__file__).parents[1] / "docs" / "rollouts.md").read_text()
EXAMPLES = re.findall(r"<!-- runnable -->\n```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL)
PRINTED = [example for example in EXAMPLES if example[1]]


@pytest.mark.parametrize(("code", "shown"), PRINTED)
def test_the_examples_print_what_the_page_shows(tmp_path: Path, code: str, shown: str) -> None:
    pytest.importorskip("peft")
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "llama")
    printed = run(tmp_path, "-c", f"import torch\ntorch.set_num_threads(1)\n{code}")
    assert printed.strip().endswith(shown.strip())


def test_the_page_has_examples() -> None:
    assert PRINTED and len(PRINTED) < len(EXAMPLES)


def test_the_ratio_is_one_before_the_first_update_and_not_before_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    (code,) = (code for code, shown in EXAMPLES if not shown)
    shorter = code.replace("range(3)", "range(2)")
    assert shorter != code and len(code.splitlines()) <= 45
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names: dict[str, Any] = {}
    exec(compile(shorter, "docs/rollouts.md", "exec"), names)
    names["llm"].close()
    found = re.findall(r"step (\d), update (\d): largest \|ratio - 1\| = (\S+)", capsys.readouterr().out)
    deviations = {(int(step), int(update)): float(value) for step, update, value in found}
    assert deviations[0, 0] == deviations[1, 0] == 0.0 and len(deviations) == 4
    assert min(deviations[0, 1], deviations[1, 1]) > 1e-3
