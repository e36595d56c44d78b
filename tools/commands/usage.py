"""`sidestream usage`: sums of a gateway's usage log."""

import argparse
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..options.engine import add_command

DESCRIPTION = """\
Sum up a gateway's usage log: requests, tokens and times by owner, key, model, adapter, endpoint, status, error, day or
hour. An adapter's name may have other weights after a reload, so --by adapter also prints the hash of its content.
Gateways may write the log at the same time."""

EXAMPLES = """\
examples:
  sidestream usage --by owner,adapter --since 1d
  sidestream usage /var/lib/sidestream/usage.db --by day --since 30d --csv
  sidestream usage --by owner --since 2026-01-01 --until 2026-02-01 --json"""

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def moment(text: str) -> float:
    """Parse `90m`, `12h`, `1d` or `2w` ago, or a date with or without a time (UTC), into seconds since the epoch."""
    if re.fullmatch(r"\d{1,6}[mhdw]", text):
        return time.time() - int(text[:-1]) * _UNITS[text[-1]]
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} must be a time such as 90m, 12h, 1d or 2w ago, or a date such as 2026-01-31"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    parser = add_command(commands, "usage", "sum up a gateway's usage log", DESCRIPTION, EXAMPLES, run)
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the log (default: that of a gateway)")
    parser.add_argument(
        "--by",
        default="owner,adapter",
        metavar="GROUP,...",
        help="groups, also key, model, endpoint, status, error, day, hour (default: %(default)s)",
    )
    parser.add_argument("--since", type=moment, metavar="TIME", help="90m, 12h, 1d, 2w, or a date (default: all)")
    parser.add_argument("--until", type=moment, metavar="TIME", help="as --since (default: now)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")


def run(options: argparse.Namespace) -> int:
    """Print the sums."""
    from ...runtime.gateway.auth.usage_database import default_path
    from ...runtime.gateway.auth.usage_report import as_csv, as_json, as_table, report

    groups = [group.strip() for group in options.by.split(",") if group.strip()]
    found = report(options.file or default_path(), groups, options.since, options.until)
    text = as_json(found) if options.json else as_csv(found) if options.csv else as_table(found)
    if found.damaged:
        print("sidestream: the log is damaged; these are the sums of the requests that can be read", file=sys.stderr)
    sys.stdout.write(text.rstrip("\n") + "\n")
    return 0
