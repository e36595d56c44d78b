"""`sidestream collect-env`: what a bug report needs to say about a machine, without names or paths of its user."""

import argparse
import json
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

from ... import __version__

EXAMPLES = """\
examples:
  sidestream collect-env            paste this into a bug report
  sidestream collect-env --json     the same for a program"""

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "sentencepiece",
    "msgspec",
    "pyzmq",
    "transformers",
    "peft",
)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command to the `sidestream` parser."""
    parser = commands.add_parser(
        "collect-env",
        help="print versions and hardware for a bug report",
        description="Print versions and hardware for a bug report; no user names, paths or environment variables are "
        "shown.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None where nvidia-smi is missing or says nothing."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().splitlines()[0] if found.stdout.strip() else None


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """Versions and hardware, JSON-able."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": found.name,
                "capability": f"{found.major}.{found.minor}",
                "sms": found.multi_processor_count,
                "memory_gib": round(found.total_memory / 2**30, 1),
            }
        )
    return {
        "sidestream": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpu_threads": torch.get_num_threads(),
        "cuda_of_torch": torch.version.cuda,
        "driver": driver_version(),
        "gpus": gpus,
        "packages": {name: package_version(name) for name in PACKAGES},
    }


def run(options: argparse.Namespace) -> int:
    """Prints what `collect` finds."""
    found = collect()
    if options.json:
        json.dump(found, sys.stdout, indent=2)
        print()
        return 0
    for name in ("sidestream", "python", "system", "libc", "cpu_threads", "cuda_of_torch", "driver"):
        print(f"{name.replace('_', ' '):<14} {found[name] if found[name] is not None else 'none'}")
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
