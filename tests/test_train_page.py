"""docs/train_and_serve.md: its training runs on the demo model, and its adapter answers as the page shows."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from support.page_commands import commands

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "train_and_serve.md").read_text()


def run(place: Path, *arguments: str) -> str:
    """Run Python with `arguments` in `place` and return its stdout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_adapter_that_the_page_trains_answers_as_the_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    shutil.copytree(DEMO_MODEL, tmp_path / "models" / "llama")
    assert "epoch 20" in run(tmp_path, "-c", code)
    (line,) = (each for each in commands(PAGE) if each.startswith("sidestream generate "))
    answers = run(tmp_path, "-m", "sidestream.tools.cli", *shlex.split(line)[1:], "--device", "cpu")
    assert answers.strip() == shown.strip()
    assert len(code.splitlines()) <= 25
