"""Versions and hardware of this machine, without names or paths of its user."""

import json
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ... import __version__

ROOT = Path(__file__).parents[2]  # the package's folder; in a checkout also the repository's

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "msgspec", "pyzmq", "transformers", "peft")


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None without nvidia-smi or its answer."""
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
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the installed commit in twelve digits, or None if unknown.

    It is that of the checkout (with a + for changed files), or the one that pip recorded when it installed from git.
    """
    if (ROOT / ".git").exists():
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        try:
            return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
        except (OSError, subprocess.SubprocessError):
            return None
    try:
        noted = json.loads(metadata.distribution("sidestream").read_text("direct_url.json") or "{}")
        found = noted.get("vcs_info", {}).get("commit_id", "")
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    return found[:12] if re.fullmatch(r"[0-9a-f]{12,64}", str(found)) else None


def version_text() -> str:
    """Return the output of `sidestream --version`; it imports neither torch nor Triton."""
    known = commit()
    return (
        f"sidestream {__version__}{f' (commit {known})' if known else ''}\n"
        f"python {platform.python_version()}, torch {package_version('torch') or 'not installed'}, "
        f"triton {package_version('triton') or 'not installed'}"
    )


def write_figures(path: Path, content: Mapping[str, Any]) -> None:
    """Write a bench's figures and the environment as JSON, and print the file's name."""
    path.write_text(json.dumps({**content, "environment": collect()}, indent=2) + "\n")
    print(f"wrote {path}")


def collect() -> dict[str, Any]:
    """Return versions and hardware for JSON."""
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
        "commit": commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpu_threads": torch.get_num_threads(),
        "cuda_of_torch": torch.version.cuda,
        "driver": driver_version(),
        "gpus": gpus,
        "packages": {name: package_version(name) for name in PACKAGES},
    }
