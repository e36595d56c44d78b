"""`sidestream collect-env`: versions and hardware for a bug report, without names or paths of the user."""

import argparse
import json
import sys
from typing import Any

from ..options.engine import add_command
from ..options.environment import collect

EXAMPLES = """\
examples:
  sidestream collect-env            paste this into a bug report
  sidestream collect-env --json     the same for a program"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    parser = add_command(
        commands,
        "collect-env",
        "print versions and hardware for a bug report",
        "Print versions and hardware for a bug report; no user names, paths or environment variables are shown.",
        EXAMPLES,
        run,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the result of `collect`."""
    found = collect()
    if options.json:
        json.dump(found, sys.stdout, indent=2)
        print()
        return 0
    for name in ("sidestream", "commit", "python", "system", "libc", "cpu_threads", "cuda_of_torch", "driver"):
        nothing = "unknown" if name == "commit" else "none"
        print(f"{name.replace('_', ' '):<14} {nothing if found[name] is None else found[name]}")
    for gpu in found["gpus"]:
        suits = "" if gpu["capability"] == "9.0" else "  (kernels are written for Hopper, 9.0)"
        print(
            f"{'gpu':<14} {gpu['name']}, {gpu['memory_gib']} GiB, {gpu['sms']} SMs, capability "
            f"{gpu['capability']}{suits}"
        )
    if not found["gpus"]:
        print(f"{'gpu':<14} none: everything runs on the CPU with reference ops")
    for name, version in found["packages"].items():
        print(f"{name:<14} {version or 'not installed'}")
    return 0
