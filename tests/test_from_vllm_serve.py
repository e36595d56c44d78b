"""docs/from_vllm_serve.md: its tables of flags hold what `sidestream serve` does with each."""

import argparse
import json
import re
from pathlib import Path

from sidestream.runtime.engine.flag_spelling import with_flags
from sidestream.runtime.engine.vllm_keywords import ANY, UNSUPPORTED_FLAGS, UNSUPPORTED_KEYWORDS, Unsupported
from sidestream.tools.cli import build_parser

PAGE = (Path(__file__).parents[1] / "docs" / "from_vllm_serve.md").read_text()
(COMMANDS,) = (action.choices for action in build_parser()._actions if action.choices)
SERVE: dict[str, argparse.Action] = COMMANDS["serve"]._option_string_actions
HIDDEN = {flag for flag, action in SERVE.items() if action.help is argparse.SUPPRESS}
TRANSLATED = {"--enable-lora", "--model", "--dtype", "--quantization", "--no-enable-prefix-caching"}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its first two lines."""
    part = re.split(r"^## ", PAGE.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def flags(cell: str) -> set[str]:
    """Return the flags that a cell names."""
    return set(re.findall(r"(?<![\w-])(--[a-z-]+)", cell))


def accepted(flag: str, foreign: Unsupported) -> str:
    """Return the values of a flag that have no effect, as its row lists them."""
    switches = [value for value in foreign.accepted if isinstance(value, bool)]
    if ANY in foreign.accepted or len(switches) == 2:
        return "any value"
    if switches:
        return f"`{flag}`" if switches[0] else f"`--no-{flag[2:]}`"
    values = [value if isinstance(value, str) else json.dumps(value) for value in foreign.accepted]
    return ", ".join(f"`{value}`" if value else "empty" for value in dict.fromkeys(values))


def expected(name: str, foreign: Unsupported) -> list[str]:
    """Return the row of a flag that has no effect or is refused."""
    flag = f"--{name.replace('_', '-')}"
    remedy = with_flags(foreign.remedy, {action.dest for action in SERVE.values()})
    return [f"`{flag}`", accepted(flag, foreign), remedy]


def test_the_table_of_other_flags_is_what_the_code_does() -> None:
    known = {
        f"--{name.replace('_', '-')}": (name, foreign)
        for name, foreign in sorted({**UNSUPPORTED_KEYWORDS, **UNSUPPORTED_FLAGS}.items())
    }
    wanted = [expected(*known[flag]) for flag in sorted(known) if flag in HIDDEN - TRANSLATED]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in wanted)
    assert rows("Flags without effect, and refused flags") == wanted, f"the page's rows should be\n{lines}"
    assert len(wanted) > 40


def test_every_hidden_flag_is_on_the_page() -> None:
    shown = flags(PAGE)
    assert {flag for flag in HIDDEN if flag not in shown and f"--{flag.removeprefix('--no-')}" not in shown} == set()


def test_flags_that_are_the_same_are_flags_of_serve() -> None:
    for cells in rows("The same flags"):
        assert flags(cells[0]) and flags(cells[0]) <= set(SERVE) - HIDDEN, cells


def test_translated_flags_lead_to_flags_of_serve() -> None:
    table = rows("Flags with another spelling")
    assert set.union(*(flags(cells[0]) for cells in table)) >= TRANSLATED
    for cells in table:
        assert flags(cells[1]) <= set(SERVE), cells
