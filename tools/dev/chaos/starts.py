"""Each start of the server's engine: how long it took, and what it holds on its device, which must not grow from one
start to the next: nothing of a killed process may stay there.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ....runtime.client.client import Client
from .served import ServedDemo

SLACK_MIB = 256
"""Of the device's memory: what a context or a lazily captured graph differ by."""


def device_mib() -> int | None:
    """MiB in use on the first visible GPU, without what living programs other than this one's hold; None without a GPU.

    What has no living owner counts: that is what a killed process would have left.
    """
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    try:
        used = _asked(first, "--query-gpu=memory.used")[0][0]
        return used - sum(mib for pid, mib in _asked(first, "--query-compute-apps=pid,used_memory") if _foreign(pid))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _asked(device: str, query: str) -> list[list[int]]:
    """The rows of numbers that nvidia-smi answers."""
    command = ["nvidia-smi", "-i", device, query, "--format=csv,noheader,nounits"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return [[int(word) for word in line.split(",")] for line in told.splitlines() if line.strip()]


def _foreign(pid: int) -> bool:
    """Whether a process lives that is neither this one nor a descendant of it."""
    if not Path(f"/proc/{pid}").exists():
        return False
    at: int | None = pid
    while at is not None and at != os.getpid():
        at = _parent(at)
    return at is None


def _parent(pid: int) -> int | None:
    """None for the first process, and for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) or None
    except OSError:
        return None


@dataclass
class Start:
    """One start: seconds until it served, its KV pages, and MiB: of the GPU process when it served, and of the device
    then and at the last look (None: there is no GPU).
    """

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
        """The server has just said ok, `seconds` after it was started or after a process was killed. Raises what the
        client raises.
        """
        with Client(served.address) as client:
            pages = int(client.stats()["pages"])
        holdings, device = served.holdings().get("GPU process"), device_mib()
        self.seen.append(Start(seconds, pages, holdings.memory >> 20 if holdings else 0, device, device))

    def look(self) -> None:
        """Note what the device holds now."""
        if self.seen and self.seen[-1].device is not None:
            self.seen[-1].last = device_mib()

    def findings(self) -> list[str]:
        """Starts with which the device held more than with the first one, or that found room for fewer KV pages."""
        found = []
        for index, start in enumerate(self.seen[1:], 2):
            first = self.seen[0]
            if start.device is not None and first.device is not None and start.device > first.device + SLACK_MIB:
                found.append(f"start {index}: {first.device} MiB of the device grew to {start.device} MiB")
            if start.pages < first.pages:
                found.append(f"start {index}: {first.pages} KV pages became {start.pages}")
        return found

    def table(self) -> list[str]:
        """A row a start."""
        if not self.seen:
            return []
        rows = [
            f"{'start':<8}{'served after, s':>16}{'KV pages':>10}{'process MiB':>13}{'device MiB, first > last':>26}"
        ]
        for index, start in enumerate(self.seen, 1):
            device = "no GPU" if start.device is None else f"{start.device}>{start.last}"
            rows.append(f"{index:<8}{start.seconds:>16.1f}{start.pages:>10}{start.process:>13}{device:>26}")
        return rows
