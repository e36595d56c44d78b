"""Completion in a shell, as argcomplete asks the program for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


def completions(line: str, tmp_path: Path) -> set[str]:
    """Return what the shell is offered at the end of a line."""
    answer = tmp_path / "answer"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "_ARGCOMPLETE_IFS": "\v",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    program = [sys.executable, "-m", "sidestream.tools.cli"]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return {word.strip() for word in answer.read_text().split("\v")}


@pytest.mark.parametrize(
    ("line", "offered", "hidden"),
    [
        ("sidestream se", {"serve"}, {"plan"}),
        ("sidestream serve --lora-mod", {"--lora-modules", "--lora-modules-from"}, {"--max-loras"}),
        ("sidestream serve --log-format ", {"text", "json"}, set()),
        ("sidestream inspect ex", {"explain"}, set()),
        ("sidestream serve --enable-", set(), {"--enable-lora", "--enable-prefix-caching"}),
    ],
)
def test_commands_flags_and_choices(line: str, offered: set[str], hidden: set[str], tmp_path: Path) -> None:
    found = completions(line, tmp_path)
    assert offered <= found and not hidden & found
