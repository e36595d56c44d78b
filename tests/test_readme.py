"""The README's runnable examples run, from the repository's root, as a reader would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
WITH_SERVER = re.findall(r"<!-- runnable next to `sidestream serve` -->\n```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", README, re.DOTALL)


def test_each_way_of_use_has_an_example() -> None:
    assert len(EXAMPLES) == 3
    assert len(WITH_SERVER) == 1
    assert len(re.findall("```python", README)) == len(EXAMPLES) + len(WITH_SERVER), (
        "a Python block is not marked as runnable"
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=["llm", "compile", "torch_compile"])
def test_example_runs(example: str) -> None:
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_client_example_runs_with_a_server(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "sidestream.tools.cli", "serve"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert any("serving at" in line for line in server.stdout), "the server ended before it served"
            done = subprocess.run(
                [sys.executable, "-c", WITH_SERVER[0]],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
        finally:
            server.terminate()
            server.communicate(timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "matey" in done.stdout


def test_relative_links_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page} links to {target}"
