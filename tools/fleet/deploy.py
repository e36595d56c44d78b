"""`sidestream fleet deploy`: a fleet of engines on Ray Serve."""

import argparse
import sys
from pathlib import Path
from typing import Any

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
    """Add the command to `sidestream fleet`."""
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
    """Deploy, and return 0 when the fleet is ready."""
    from ...runtime.fleet.options import FleetOptions, read_options

    fleet = FleetOptions() if options.file is None else read_options(options.file)
    if options.check:
        print(f"{options.file or 'the demo fleet'} is in order")
        return 0
    need_ray()
    from ...runtime.fleet.cluster import connect

    if connect(start=True):
        _log("started a Ray that only this machine can reach; `ray stop` ends it")
    from ...runtime.fleet.application import deploy, missing_resources

    _log(f"deploying {fleet.name}")
    if why := missing_resources(fleet):
        _log(why)
    deploy(fleet)
    _log(f"answering HTTP at http://{fleet.host}:{fleet.port}")
    return 0


def need_ray() -> None:
    """Raise ValueError without the extra."""
    from importlib.util import find_spec

    # a search for ray.serve would import ray before its token is required
    if find_spec("ray") is None:
        raise ValueError("a fleet needs Ray Serve; pip install 'sidestream[ray]'")


def _log(line: str) -> None:
    print(f"sidestream: {line}", file=sys.stderr, flush=True)
