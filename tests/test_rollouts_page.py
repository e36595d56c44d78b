"""docs/rollouts.md: the training runs on the demo model, and its ratio is exactly 1 before each first update."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from sidestream.runtime.demo_model import DEMO_MODEL

PAGE = (Path(__file__).parents[1] / "docs" / "rollouts.md").read_text()


def test_the_ratio_is_one_before_the_first_update_and_not_before_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    (code,) = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", PAGE, re.DOTALL)
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
