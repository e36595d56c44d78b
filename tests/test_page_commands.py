"""Every command line of README, CONTRIBUTING and docs/ fits the parser; tests/first_hour runs those of a newcomer."""

import shlex
from pathlib import Path

import pytest
from sidestream.tools.cli import build_parser, with_new_name
from support.page_commands import commands

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CALLS = [(page.name, line) for page in PAGES for line in commands(page.read_text()) if line.startswith("sidestream ")]


@pytest.mark.parametrize(("page", "line"), CALLS, ids=[f"{page}: {line}" for page, line in CALLS])
def test_a_command_of_a_page_is_one_that_the_parser_takes(page: str, line: str) -> None:
    if line == "sidestream COMMAND --help":
        return
    try:
        parsed = build_parser().parse_args(with_new_name(shlex.split(line)[1:]))
    except SystemExit as leave:
        assert leave.code == 0, line  # --help
    else:
        assert callable(parsed.run)


def test_the_pages_have_commands() -> None:
    assert len(CALLS) >= 15 and {page for page, _ in CALLS} >= {"quickstart.md", "tuning.md", "how_it_works.md"}
