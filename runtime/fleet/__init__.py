"""Many engines on Ray Serve. Only this folder and `tools/commands/fleet.py` import Ray, and only when a fleet is used.

options        `fleet.toml`, checked
application    the Ray Serve application: the deployments `engine` and `ingress`
policies       what Ray calls: the number of engines, and the replica of a call
engine         a replica of the deployment `engine`: a child process, its address, and its files
ingress        a replica of the deployment `ingress`: the gateway in front of the engines
loopback_only  admission of loopback clients, for HTTP without keys
cluster        connects to Ray, or starts a local one that is closed to others
status         state of a fleet, for `sidestream fleet status`

Requests and tokens do not pass through Ray: the gateway's router connects to the engines. Ray places engines, restarts
those that die, and changes their number.
"""

from pathlib import Path
from typing import Any


def app(arguments: dict[str, str]) -> Any:
    """For `serve run sidestream.runtime.fleet:app fleet=fleet.toml`. Raises ValueError for an invalid file."""
    from .application import build
    from .options import FleetOptions, read_options

    unknown = sorted(arguments.keys() - {"fleet"})
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r}; give fleet=FILE, or no argument for the demo model")
    return build(read_options(Path(arguments["fleet"])) if "fleet" in arguments else FleetOptions())
