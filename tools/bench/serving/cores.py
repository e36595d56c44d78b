"""CPU cores for the clients of a bench, and others for its server."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SERVER_CORES = 4
"""For a batcher, a GPU process, a gateway and their children; with fewer cores, sharing all is better."""


class Cores(NamedTuple):
    """Logical CPUs."""

    server: list[int]
    clients: list[int]


def siblings(cpu: int) -> str:
    """Return the logical CPUs of one core in Linux's notation, or the CPU itself if unknown."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def split_cores(clients: int) -> Cores | None:
    """Return a core for each client process and the rest for the server; None if that leaves too few.

    Hardware threads of one core go to the same side.
    """
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        by_core.setdefault(siblings(cpu), []).append(cpu)
    cores = list(by_core.values())
    if len(cores) < clients + SERVER_CORES:
        return None
    own, rest = cores[-clients:], cores[:-clients]
    return Cores([cpu for core in rest for cpu in core], [cpu for core in own for cpu in core])


@contextmanager
def on_cores(cpus: Sequence[int] | None) -> Iterator[None]:
    """Run processes that start in this context on these CPUs; None: without a restriction."""
    before = os.sched_getaffinity(0)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
