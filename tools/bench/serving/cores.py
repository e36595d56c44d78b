"""Cores for the clients of a bench, and others for the server that it loads."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SERVER_CORES = 4
"""A batcher, a GPU process, a front and what they start: with fewer, the cores are better shared."""


class Cores(NamedTuple):
    """Logical CPUs."""

    server: list[int]
    clients: list[int]


def siblings(cpu: int) -> str:
    """The logical CPUs of one core, as Linux names them; the CPU itself where it does not tell."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def split_cores(clients: int) -> Cores | None:
    """A core for each of so many client processes, and the rest for the server; None where that leaves too few.

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
    """What is started in here runs on these; None: wherever this process does."""
    before = os.sched_getaffinity(0)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
