"""What README.md, CONTRIBUTING.md and docs/*.md name exists: files, modules, commands, wings."""

import argparse
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from sidestream.tools.cli import build_parser
from sidestream.tools.dev.pages.api import commands

ROOT = Path(__file__).parents[1]
LEVELS = ("ops", "graphs", "compiler", "runtime", "tools")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
PATH = re.compile(rf"(?<![\w/.<-])(?:{'|'.join(LEVELS)}|tests|docs)/(?:[\w.-]+/)*[\w.-]*\w/?")
MADE_UP = re.compile(r"my_|FOLDER")  # names that stand for the reader's own
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """The page without its fenced blocks, which other tests run or compare."""
    return FENCED.sub("", page.read_text())


@each_page
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = {found for found in PATH.findall(prose(page)) if not MADE_UP.search(found)}
    assert not [found for found in sorted(named) if not (ROOT / found).exists()]


def test_the_pages_name_paths() -> None:
    assert sum(len(PATH.findall(prose(page))) for page in PAGES) >= 40


@each_page
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    text = prose(page)
    named = {f"sidestream.{found}" for found in re.findall(rf"`((?:{'|'.join(LEVELS)})(?:\.[a-z_0-9]+)+)`", text)}
    named |= {found.rstrip(".") for found in re.findall(r"python -m (sidestream[\w.]+)", text)}
    assert not [found for found in sorted(named) if find_spec(found) is None]


@each_page
def test_every_command_that_a_page_names_is_there_with_its_options(page: Path) -> None:
    wrong = []
    for call in re.findall(r"(?:`|^    )sidestream ([a-z][^`\n]*?)(?:`|  |$)", prose(page), re.MULTILINE):
        parser: argparse.ArgumentParser = build_parser()
        for word in call.split():
            choices = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
            if choices and word not in choices[0]:
                wrong.append(call)
                break
            parser = choices[0][word] if choices else parser
            if word.startswith("-") and word not in parser._option_string_actions:
                wrong.append(call)
    assert not wrong


def test_the_commands_are_listed() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    shown = re.findall(r"`([^`]*)`", text.partition("::: commands")[0])
    names = [each.prog.removeprefix("sidestream ") for each in commands(build_parser())]
    missing = [name for name in names if not any(each.removeprefix("sidestream ").startswith(name) for each in shown)]
    assert not missing, "add them to the table of docs/commands.md"
