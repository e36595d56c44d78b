"""`sidestream diff`: what changed between two dumps."""

import argparse
import json
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Say what changed between two dumps (of two option sets, or of two releases): options, matches and refusals of the
passes, and for each program kernels, bytes, memory, and the estimated time. Exit code 0: the same, 1: they differ."""

EXAMPLES = """\
examples:
  sidestream dump -o with/ && sidestream dump --disable-pass pack_projections -o without/
  sidestream diff with/ without/"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "diff",
        help="say what changed between two dumps",
        usage="%(prog)s DUMP_A DUMP_B [--json]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=Path, metavar="DUMP_A", help="a directory that `sidestream dump` wrote")
    parser.add_argument("second", type=Path, metavar="DUMP_B", help="another one")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Reads both and prints the difference."""
    from ...compiler.inspect.compare_dumps import as_text, difference, read_dump

    found = difference(read_dump(options.first), read_dump(options.second))
    print(json.dumps(found) if options.json else as_text(found), end="\n" if options.json else "")
    return 1 if any(found.values()) else 0
