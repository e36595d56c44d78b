"""docs/from_vllm_serve.md and docs/coming_from.md: their tables hold what `sidestream serve` does with each flag."""

import argparse
import json
import re
import tomllib
from pathlib import Path

from sidestream.runtime.engine.flag_spelling import with_flags
from sidestream.runtime.engine.vllm_keywords import ANY
from sidestream.tools.cli import build_parser
from sidestream.tools.options.launcher_flags import LauncherFlag, launcher_flags

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "from_vllm_serve.md").read_text()
(COMMANDS,) = (action.choices for action in build_parser()._actions if action.choices)
SERVE: dict[str, argparse.Action] = COMMANDS["serve"]._option_string_actions
HIDDEN = {flag for flag, action in SERVE.items() if action.help is argparse.SUPPRESS}
TRANSLATED = {"--enable-lora", "--model", "--dtype", "--quantization", "--no-enable-prefix-caching"}
LAUNCHERS = tomllib.loads((ROOT / "tests" / "tools" / "options" / "launchers.toml").read_text())
VLLM = {word.rstrip("=") for name in ("vllm", "older_vllm") for word in LAUNCHERS[name].split()}


def rows(heading: str, page: str = PAGE) -> list[list[str]]:
    """Return the cells of the table under a heading, without its first two lines."""
    part = re.split(r"^##+ ", page.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def flags(cell: str) -> set[str]:
    """Return the flags that a cell names."""
    return set(re.findall(r"(?<![\w-])(--?[A-Za-z][a-z0-9-]*)", cell))


def shown(name: str, flag: LauncherFlag) -> str:
    """Return a flag and its values without effect, as the page shows them."""
    if is_free(flag):
        return f"`{name}`"
    values = [value for value in flag.unsupported.accepted if not isinstance(value, bool)]
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    texts = [f"`{text}`" if text else "empty" for text in dict.fromkeys(texts)]
    texts += [f"`{name}`"] if flag.nargs == 0 and True in flag.unsupported.accepted else []
    return f"`{name}`" + (f" ({', '.join(texts)})" if texts else "")


def is_free(flag: LauncherFlag) -> bool:
    """Return whether every value has no effect."""
    accepted = flag.unsupported.accepted
    return ANY in accepted or sum(isinstance(value, bool) for value in accepted) == 2


def expected(free: bool) -> list[list[str]]:
    """Return the rows of vLLM's flags without any effect, or of the others: flags with one reason share a row."""
    groups: dict[str, list[str]] = {}
    for name, flag in sorted(launcher_flags()[1].items()):
        if name in VLLM and name not in SERVE and is_free(flag) == free:
            options = {action.dest for action in SERVE.values()}
            remedy = with_flags(flag.unsupported.remedy, options) if flag.is_keyword else flag.unsupported.remedy
            groups.setdefault(remedy, []).append(shown(name, flag))
    return sorted([", ".join(names), remedy] for remedy, names in groups.items())


def test_the_tables_of_other_flags_are_what_the_code_does() -> None:
    for heading, free in (("Flags without effect", True), ("Refused flags", False)):
        wanted = expected(free)
        lines = "\n".join(f"| {' | '.join(row)} |" for row in wanted)
        assert rows(heading) == wanted, f"the rows of {heading!r} should be\n{lines}"
        assert len(wanted) > 10


def test_every_flag_of_vllm_is_on_the_page() -> None:
    named = flags(PAGE)
    assert {
        flag for flag in VLLM | HIDDEN if flag not in named and f"--{flag.removeprefix('--no-')}" not in named
    } == set()


def test_flags_that_are_the_same_are_flags_of_serve() -> None:
    for cells in rows("The same flags"):
        assert flags(cells[0]) and flags(cells[0]) <= set(SERVE) - HIDDEN, cells


def test_translated_flags_lead_to_flags_of_serve() -> None:
    table, renamed = rows("Flags with another spelling"), launcher_flags()[0]
    assert set.union(*(flags(cells[0]) for cells in table)) >= TRANSLATED | renamed.keys() & VLLM
    for cells in table:
        assert flags(cells[1]) <= set(SERVE) | set(launcher_flags()[1]), cells
        for name in flags(cells[0]) & renamed.keys():
            assert renamed[name] in flags(cells[1]), cells


def test_renamed_flags_of_sglang_and_lorax_are_in_their_tables() -> None:
    page = (ROOT / "docs" / "coming_from.md").read_text()
    for heading, name in (("From SGLang", "sglang"), ("From LoRAX", "lorax")):
        theirs = {word.rstrip("=") for word in LAUNCHERS[name].split()}
        told = {flag: flags(cells[1]) for cells in rows(heading, page) for flag in flags(cells[0])}
        for flag, ours in launcher_flags()[0].items():
            if flag in theirs and flag not in VLLM:
                assert ours in told.get(flag, set()), f"{heading}: {flag} is {ours}"
