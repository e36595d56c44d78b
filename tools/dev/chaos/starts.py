"""Starts of the server's engine: time, and memory of the device, which must not grow from start to start."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ....runtime.client.client import Client
from .served import Holdings, ServedDemo, descendants

SLACK_MIB = 256
"""Share of the device's memory by which contexts and lazily captured graphs differ."""


def device_mib() -> int | None:
    """Return MiB in use on the first visible GPU without other living programs; None without a GPU.

    Memory without a living owner counts, since a killed process might leave it.
    """
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    try:
        used, own = _asked(first, "--query-gpu=memory.used")[0][0], descendants(os.getpid())
        apps = _asked(first, "--query-compute-apps=pid,used_memory")
        return used - sum(mib for pid, mib in apps if pid not in own and Path(f"/proc/{pid}").exists())
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _asked(device: str, query: str) -> list[list[int]]:
    """Return rows of numbers of nvidia-smi."""
    command = ["nvidia-smi", "-i", device, query, "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return [[int(word) for word in line.split(",")] for line in output.splitlines() if line.strip()]


@dataclass
class Start:
    """One start: seconds until it served, KV pages, and MiB of the GPU process and of the device (None: no GPU)."""

    seconds: float
    pages: int
    process: int
    device: int | None
    last: int | None


class Starts:
    """All starts of a run."""

    def __init__(self) -> None:
        self.seen: list[Start] = []

    def began(self, served: ServedDemo, seconds: float) -> None:
        """Record that the server is healthy `seconds` after a start or a kill. Raises the client's errors."""
        with Client(served.address) as client:
            pages = int(client.stats()["pages"])
        pid, device = served.processes().get("GPU process"), device_mib()
        holdings = None if pid is None else Holdings.of(pid)
        self.seen.append(Start(seconds, pages, holdings.memory >> 20 if holdings else 0, device, device))

    def look(self) -> None:
        """Record the device's memory."""
        if self.seen and self.seen[-1].device is not None:
            self.seen[-1].last = device_mib()

    def findings(self) -> list[str]:
        """Return starts with more device memory than the first, or with fewer KV pages."""
        found = []
        for index, start in enumerate(self.seen[1:], 2):
            first = self.seen[0]
            if start.device is not None and first.device is not None and start.device > first.device + SLACK_MIB:
                found.append(f"start {index}: {first.device} MiB of the device grew to {start.device} MiB")
            if start.pages < first.pages:
                found.append(f"start {index}: {first.pages} KV pages became {start.pages}")
        return found

    def table(self) -> list[str]:
        """Return a row for each start."""
        if not self.seen:
            return []
        rows = [
            f"{'start':<8}{'served after, s':>16}{'KV pages':>10}{'process MiB':>13}{'device MiB, first > last':>26}"
        ]
        for index, start in enumerate(self.seen, 1):
            device = "no GPU" if start.device is None else f"{start.device}>{start.last}"
            rows.append(f"{index:<8}{start.seconds:>16.1f}{start.pages:>10}{start.process:>13}{device:>26}")
        return rows
