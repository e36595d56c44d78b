"""`sidestream fleet status` and `sidestream fleet stop`: show or stop a running fleet."""

import argparse
from typing import Any

from .deploy import need_ray


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add both commands to `sidestream fleet`."""
    parser = commands.add_parser(
        "status",
        help="show the engines of a fleet and their load",
        description="Show the engines, their load, and the reasons for routing requests to them; exit code 1: the "
        "fleet does not run.",
    )
    parser.add_argument("--name", default="sidestream", help="the fleet's name (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run_status)
    parser = commands.add_parser(
        "stop",
        help="stop a fleet",
        description="Stop a fleet after its running requests; Ray itself runs until `ray stop`.",
    )
    parser.add_argument("--name", default="sidestream", help="the fleet's name (default: %(default)s)")
    parser.set_defaults(run=run_stop)


def run_status(options: argparse.Namespace) -> int:
    """Print the status; return 1 if the fleet does not run."""
    need_ray()
    import msgspec

    from ...runtime.fleet.cluster import connect
    from ...runtime.fleet.status import fleet_status, format_status

    connect(start=False)
    found = fleet_status(options.name)
    print(msgspec.json.encode(found).decode() if options.json else format_status(found))
    return 0 if found.state == "RUNNING" else 1


def run_stop(options: argparse.Namespace) -> int:
    """Stop the fleet."""
    need_ray()
    from ...runtime.fleet.cluster import connect

    connect(start=False)
    from ray import serve

    serve.delete(options.name)
    return 0
