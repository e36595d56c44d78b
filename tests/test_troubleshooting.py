"""Every message that docs/troubleshooting.md quotes is one that the program can print."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
PLACEHOLDER = "\0"


@cache
def messages() -> tuple[str, ...]:
    """Every string of the sources, with one mark for each value that is put in."""
    found = []
    for level in ("compiler", "graphs", "ops", "runtime", "tools"):
        for path in (ROOT / level).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[rsd]", PLACEHOLDER, node.value))
    return tuple(each for each in found if " " in each)


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_message_is_one_of_the_program(quoted: str) -> None:
    parts = [re.escape(part).replace("\\ ", "[ \0]+") for part in quoted.split("…")]
    pattern = re.compile(f".*{PLACEHOLDER}.*".join(parts).strip(), re.DOTALL)
    assert any(pattern.search(message) for message in messages())


def test_the_page_quotes_enough_and_nothing_twice() -> None:
    assert len(QUOTED) == len(set(QUOTED)) >= 40
