"""`sidestream fleet deploy`, `status` and `stop`: a fleet of engines on Ray Serve."""

import argparse
from pathlib import Path
from typing import Any

from ..options.engine import add_command, report

DESCRIPTION = """\
Start a fleet of engines on Ray Serve, or change the running one: replicas are replaced one by one while requests
continue. Ray is that of $RAY_ADDRESS or of this machine; otherwise a Ray that only this machine can reach is started.
Needs the extra `ray`."""

EXAMPLES = """\
examples:
  sidestream fleet deploy                      the demo model on the CPU
  sidestream fleet deploy fleet.toml
  sidestream fleet deploy fleet.toml --check   check the file, and start nothing

fleet.toml (all keys: docs/scaling.md):
  model = "models/llama"
  max-replicas = 4
  keys = "keys.toml"
  [engine]
  max-num-seqs = 128
  [lora-modules]
  sql = "adapters/sql\""""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the commands to `sidestream fleet`."""
    usage = "%(prog)s [FILE] [--check]"
    parser = add_command(
        commands, "deploy", "start or change a fleet of engines on Ray Serve", DESCRIPTION, EXAMPLES, deploy, usage
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a fleet's TOML file (default: a demo)")
    parser.add_argument("--check", action="store_true", help="check the file only")
    parser = commands.add_parser(
        "status",
        help="show the engines of a fleet and their load",
        description="Show the engines, their load, and why requests went to them; exit code 1: it does not run.",
    )
    parser.add_argument("--name", default="sidestream", help="the fleet's name (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=status)
    parser = commands.add_parser(
        "stop",
        help="stop a fleet",
        description="Stop a fleet after its running requests; Ray itself runs until `ray stop`.",
    )
    parser.add_argument("--name", default="sidestream", help="the fleet's name (default: %(default)s)")
    parser.set_defaults(run=stop)


def deploy(options: argparse.Namespace) -> int:
    """Deploy, and return 0 when the fleet is ready."""
    from ...runtime.fleet.options import FleetOptions, read_options

    fleet = FleetOptions() if options.file is None else read_options(options.file)
    if options.check:
        print(f"{options.file or 'the demo fleet'} is in order")
        return 0
    need_ray()
    from ...runtime.fleet.cluster import connect

    if connect(start=True):
        report("started a Ray that only this machine can reach; `ray stop` ends it")
    from ...runtime.fleet.application import deploy as deploy_fleet
    from ...runtime.fleet.application import missing_resources

    report(f"deploying {fleet.name}")
    if why := missing_resources(fleet):
        report(why)
    deploy_fleet(fleet)
    report(f"answering HTTP at http://{fleet.host}:{fleet.port}")
    return 0


def status(options: argparse.Namespace) -> int:
    """Print the status; return 1 if the fleet does not run."""
    need_ray()
    import msgspec

    from ...runtime.fleet.cluster import connect
    from ...runtime.fleet.status import fleet_status, format_status

    connect(start=False)
    found = fleet_status(options.name)
    print(msgspec.json.encode(found).decode() if options.json else format_status(found))
    return 0 if found.state == "RUNNING" else 1


def stop(options: argparse.Namespace) -> int:
    """Stop the fleet."""
    need_ray()
    from ...runtime.fleet.cluster import connect

    connect(start=False)
    from ray import serve

    serve.delete(options.name)
    return 0


def need_ray() -> None:
    """Raise ValueError without the extra."""
    from importlib.util import find_spec

    # a search for ray.serve would import ray before its token is required
    if find_spec("ray") is None:
        raise ValueError("a fleet needs Ray Serve; pip install 'sidestream[ray]'")
