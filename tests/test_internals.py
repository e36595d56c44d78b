"""docs/internals.md shows the code as it is, docs/custom_pass.md a program that runs.

After a change of passes, programs or the cost model: `python -m sidestream.tools.dev.pages.tables --write`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sidestream.tools.dev.pages.excerpts import EXCERPTS
from sidestream.tools.dev.pages.tables import blocks, main
from support.excerpts import same_torch, shown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals.md"


@same_torch
@pytest.mark.parametrize("name", EXCERPTS)
def test_the_excerpt_is_up_to_date(name: str) -> None:
    assert shown(name) == EXCERPTS[name](), "run `python -m sidestream.tools.dev.pages.tables --write`"


def test_every_excerpt_is_shown_once_and_every_block_is_an_excerpt() -> None:
    text = PAGE.read_text()
    names = blocks(text)
    assert len(names) == text.count("<!-- excerpt: ") and set(names) == set(EXCERPTS)
    assert len(re.findall(r"^```\w", text, re.MULTILINE)) == len(names), "a fenced block has no generator"


@same_torch
def test_a_stale_page_is_told_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- excerpt: source of the norm -->\n```python\nold\n```\nafter\n")
    assert main([str(page)]) == 1 and "-old" in capsys.readouterr().out
    assert main([str(page), "--write"]) == 0 and "rsqrt" in page.read_text() and page.read_text().endswith("after\n")
    assert main([str(page)]) == 0


def test_the_custom_pass_runs_and_is_the_one_on_its_page(tmp_path: Path) -> None:
    script, page = ROOT / "docs" / "custom_pass.py", (ROOT / "docs" / "custom_pass.md").read_text()
    assert script.read_text() in page
    command, environment = [sys.executable, str(script), str(tmp_path / "dump")], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^angles_on_side +lowers +1 +0 ", done.stdout, re.MULTILINE) and re.search(
        r"^rope_angles +side +1 .*not on it", done.stdout, re.MULTILINE
    )
    changed = (tmp_path / "dump" / "06_angles_on_side.diff").read_text()
    assert "side stream, 25% of the SMs" in changed


@pytest.mark.parametrize("name", ["internals.md", "custom_pass.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target


def test_every_file_of_the_task_table_exists() -> None:
    table = PAGE.read_text().partition("\n## Files by task\n")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    files = [re.findall(r"\[([^\]]+)\]\(\.\./([^)]+)\)", row) for row in rows]
    assert len(rows) >= 30 and all(files)
    assert [label for row in files for label, path in row if label != path or not (ROOT / path).is_file()] == []
