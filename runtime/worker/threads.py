"""How many threads the reference ops take on a CPU."""

import os
from pathlib import Path

import torch

MOST_THREADS = 4
CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def fit_threads(device: torch.device, ranks: int = 1) -> None:
    """Gives torch the threads of `free_threads` for a model on a CPU, unless the user chose a number: by
    OMP_NUM_THREADS or MKL_NUM_THREADS, or by a number in torch that is not its own default. Processes that share a
    model (`ranks`) share the threads.

    A step on a CPU is hundreds of short ops, after each of which all threads wait for the last one. Where another
    process holds a core, that wait is a time slice of the system: steps then take ten times as long as on one thread.
    """
    cores = os.sched_getaffinity(0)
    physical = len({_siblings(core) for core in cores})
    if device.type != "cpu" or any(os.environ.get(name) for name in CHOICES):
        return
    if torch.get_num_threads() in (len(cores), physical):
        torch.set_num_threads(max(1, free_threads(physical, os.getloadavg()[0]) // ranks))


def free_threads(cores: int, load: float) -> int:
    """The physical cores that the last minute's load leaves free: at least one thread, at most four."""
    return max(1, min(MOST_THREADS, cores - round(load)))


def _siblings(core: int) -> str:
    """A name that all hardware threads of a physical core share."""
    try:
        return Path(SIBLINGS.format(core)).read_text()
    except OSError:  # some containers hide it: each counts as a core
        return str(core)
