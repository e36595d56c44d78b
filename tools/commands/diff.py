"""`sidestream inspect diff`: differences between two dumps."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..options.engine import add_command

DESCRIPTION = """\
Print the differences between two dumps (of two option sets, or of two releases): options, matches and refusals of the
passes, and for each program kernels, bytes, memory, and the estimated time. Exit code 0: equal, 1: different."""

EXAMPLES = """\
examples:
  sidestream inspect dump -o with/ && sidestream inspect dump --disable-pass pack_projections -o without/
  sidestream inspect diff with/ without/"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to `sidestream inspect`."""
    usage = "%(prog)s DUMP_A DUMP_B [--json]"
    parser = add_command(commands, "diff", "print the differences between two dumps", DESCRIPTION, EXAMPLES, run, usage)
    parser.add_argument("first", type=Path, metavar="DUMP_A", help="a directory of `sidestream inspect dump`")
    parser.add_argument("second", type=Path, metavar="DUMP_B", help="another directory")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """Read both dumps and print the differences."""
    from ...compiler.inspect.compare_dumps import as_text, difference, read_dump

    found = difference(read_dump(options.first), read_dump(options.second))
    print(json.dumps(found) if options.json else as_text(found), end="\n" if options.json else "")
    return 1 if any(found.values()) else 0
