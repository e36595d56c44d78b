"""`sidestream deploy`: a fleet of engines on Ray Serve."""

import argparse
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Start a fleet of engines on Ray Serve, or change the one that runs: its replicas are replaced one by one, and requests
go on meanwhile. Ray is the one of $RAY_ADDRESS, or of this machine; where there is none, one is started that only this
machine can reach. Needs the extra `ray`."""

EXAMPLES = """\
examples:
  sidestream deploy                      the demo model on the CPU
  sidestream deploy fleet.toml
  sidestream deploy fleet.toml --check   say what is wrong with the file, and start nothing

fleet.toml (all keys: docs/fleet.md):
  model = "models/llama"
  max-replicas = 4
  keys = "keys.toml"
  [engine]
  max-num-seqs = 128
  [lora-modules]
  sql = "adapters/sql\""""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "deploy",
        help="start or change a fleet of engines on Ray Serve",
        usage="%(prog)s [FILE] [--check]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a fleet's TOML file (default: a demo)")
    parser.add_argument("--check", action="store_true", help="check the file only")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Deploys; returns 0 when the fleet is ready."""
    from ...runtime.fleet.options import FleetOptions, read_options

    fleet = FleetOptions() if options.file is None else read_options(options.file)
    if options.check:
        print(f"{options.file or 'the demo fleet'} is in order")
        return 0
    need_ray()
    from ...runtime.fleet.cluster import connect

    if connect(start=True):
        _say("started a Ray that only this machine can reach; `ray stop` ends it")
    from ...runtime.fleet.application import deploy, missing_resources

    _say(f"deploying {fleet.name}")
    if why := missing_resources(fleet):
        _say(why)
    deploy(fleet)
    _say(f"answering HTTP at http://{fleet.host}:{fleet.port}")
    return 0


def need_ray() -> None:
    """Raises ValueError without the extra."""
    from importlib.util import find_spec

    if (
        find_spec("ray") is None
    ):  # not of ray.serve: looking for that would import ray, before it is made to ask for a token
        raise ValueError("a fleet needs Ray Serve; pip install 'sidestream[ray]'")


def _say(line: str) -> None:
    print(f"sidestream: {line}", file=sys.stderr, flush=True)
