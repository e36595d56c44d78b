"""README.md: its length, its commands, its links and its pass table. tests/first_hour runs its examples."""

import re
from pathlib import Path

from sidestream.compiler.pipeline import pass_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_is_short_and_names_the_first_commands_early() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert all(f"    {command} " in "\n".join(lines[:50]) for command in ("make demo", "make test"))


def test_every_python_block_is_run() -> None:
    runnable = re.findall(r"<!-- runnable(?: next to `sidestream serve`)? -->\n```python\n", README)
    assert len(runnable) == len(re.findall("```python", README)) >= 1


def test_every_pass_of_the_table_is_in_the_pipeline() -> None:
    table = README.partition("| stage | passes |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert len(named) > 10 and named <= set(pass_names())


def test_relative_links_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page} links to {target}"
