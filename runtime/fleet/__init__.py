"""Many engines on Ray Serve. Only this folder and `tools/fleet` import Ray, and only when a fleet is asked for.

options          what `fleet.toml` says, checked
application      the Ray Serve application: the deployments `engine` and `ingress`
engine           one replica: a GPU, an engine, where it is reached, how loaded it is
engine_process   that engine as a child: `sidestream serve` without HTTP
ingress          the gateway before the engines that there are
private_address  where an engine listens, and what it leaves there
this_machine     HTTP without keys is for the loopback
adapter_root     a folder whose folders are the fleet's adapters
request_router   Ray's side of the list of engines
members          the list itself, handed from Ray's thread to the gateway's
policy           how many engines there should be
cluster          the Ray that a fleet runs on, local or there already, and what it must not leave open
status           what a fleet is doing

Requests and tokens do not pass through Ray: the gateway's router speaks with the engines themselves. Ray places
engines, starts those that die again, and changes their number.
"""

from pathlib import Path
from typing import Any


def app(arguments: dict[str, str]) -> Any:
    """For `serve run sidestream.runtime.fleet:app fleet=fleet.toml`. Raises ValueError for a file that is none."""
    from .application import build
    from .options import FleetOptions, read_options

    unknown = sorted(arguments.keys() - {"fleet"})
    if unknown:
        raise ValueError(f"there is no argument {unknown[0]!r}; give fleet=FILE, or nothing for the demo model")
    return build(read_options(Path(arguments["fleet"])) if "fleet" in arguments else FleetOptions())
