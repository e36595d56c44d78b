"""The machine that a figure was measured on, without names or paths of its user."""

import platform
import subprocess
from importlib import metadata
from typing import Any

from ... import __version__

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
