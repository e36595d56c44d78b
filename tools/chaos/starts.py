"""Each start of the server's engine: how long it took, and what it holds on its device, which must not grow from one
start to the next: nothing of a killed process may stay there.
"""

import os
import subprocess
from dataclasses import dataclass

from ...runtime.client.client import Client
from .served import ServedDemo

SLACK_MIB = 256
"""Of the device's memory: what a context or a lazily captured graph differ by."""


def device_mib() -> int | None:
    """MiB in use on the first visible GPU by whatever process, as nvidia-smi counts them; None without a GPU."""
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    command = ["nvidia-smi", "-i", first, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return int(found[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
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
