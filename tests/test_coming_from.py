"""docs/coming_from.md: the engine's counters and the flags that it names are there."""

import re
from dataclasses import asdict, fields
from pathlib import Path

from clients.run import FOLDER, in_turn, pinned
from sidestream.runtime.scheduler.limits import SchedulerStats
from sidestream.runtime.server.stepper import published
from sidestream.tools.cli import build_parser

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming_from.md").read_text()


def ours(heading: str) -> str:
    """The last column of the tables under a heading, and the first where the last says "the same"."""
    part = PAGE.partition(f"{heading}\n")[2]
    rows = re.split(r"^##", part, maxsplit=1, flags=re.MULTILINE)[0]
    cells = [line.split("|")[1:3] for line in rows.splitlines() if line.startswith("| ") and "---" not in line]
    return " ".join(here + (there if here.strip().startswith("the same") else "") for there, here in cells)


def test_every_counter_is_one_that_a_server_has() -> None:
    nothing = SchedulerStats(**{each.name: 0 for each in fields(SchedulerStats)})
    known = set(published(asdict(nothing))) | {"list_adapters"}
    for path in (ROOT / "runtime" / "server").glob("*.py"):
        known |= set(re.findall(r'"([a-z_]+)":', path.read_text()))
    named = set(re.findall(r"`([a-z_]+)`", ours("### Metrics")))
    assert len(named) > 10 and named <= known


def test_every_flag_is_one_of_serve() -> None:
    (commands,) = (action.choices for action in build_parser()._actions if action.choices)
    flags = set(commands["serve"]._option_string_actions)
    named = set(re.findall(r"(?<![\w-])(--[a-z-]+)", ours("## From LoRAX")))
    assert len(named) > 8 and named <= flags


def test_clients_tried_are_the_pinned_ones_with_what_their_scripts_run() -> None:
    """The table's rows are made of requirements.txt, package.json and the first line of each script."""
    rows = []
    for name, requirements in pinned().items():
        (script,) = FOLDER.glob(f"with_{name}.*")
        found = re.match(
            r'(?:"""|// )Run (?P<client>[^:]+): (?P<runs>.+?)\.(?:"""|$)', script.read_text(), re.MULTILINE
        )
        assert found is not None, script
        releases = ", ".join(f"`{each}`" for each in requirements)
        rows.append(f"| {found['client']} | {releases} | {found['runs']} |")
    table = PAGE.partition("<!-- clients -->")[2].partition("<!-- end -->")[0]
    assert [line for line in table.splitlines() if line.startswith("| ")][2:] == rows


def test_every_script_has_a_pinned_client() -> None:
    assert {path.stem for path in FOLDER.glob("with_*")} == {f"with_{name}" for name in pinned()}


def test_consecutive_turns_run_every_client() -> None:
    names = list(pinned())
    for turn in range(40):
        both = in_turn(names, 12, turn) + in_turn(names, 12, turn + 1)
        assert set(both) == set(names) and len(set(both[:12])) == 12
