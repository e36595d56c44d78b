"""`sidestream fleet`: what a fleet of `sidestream deploy` is doing, and its end."""

import argparse
from typing import Any

from .deploy import need_ray

EXAMPLES = """\
examples:
  sidestream fleet status
  sidestream fleet status --json
  sidestream fleet stop          engines finish what they have; Ray itself goes on until `ray stop`"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "fleet",
        help="show or stop a fleet on Ray Serve",
        description="Show or stop a fleet that `sidestream deploy` started. Needs the extra `ray`.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["status", "stop"], metavar="{status,stop}")
    parser.add_argument("--name", default="sidestream", help="the fleet's name (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0; 1 for a fleet that does not run."""
    need_ray()
    import msgspec

    from ...runtime.fleet.cluster import connect

    connect(start=False)
    if options.action == "stop":
        from ray import serve

        serve.delete(options.name)
        return 0
    from ...runtime.fleet.status import fleet_status, format_status

    found = fleet_status(options.name)
    print(msgspec.json.encode(found).decode() if options.json else format_status(found))
    return 0 if found.state == "RUNNING" else 1
