"""Number of torch threads for a model on a CPU."""

import os
from pathlib import Path

import torch

MAX_THREADS = 4
USER_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def limit_cpu_threads(device: torch.device, tp_size: int = 1) -> None:
    """Set the number of torch threads for a model on a CPU to `free_threads`, shared by `tp_size` processes.

    A number that the user has set, in USER_VARIABLES or in torch, is kept.

    A step on a CPU runs hundreds of short ops, and each op waits for its slowest thread. If another process occupies a
    core, each wait takes a time slice of the system, and a step takes ten times as long as on one thread.
    """
    cores = os.sched_getaffinity(0)
    physical = len({_siblings(core) for core in cores})
    if device.type != "cpu" or any(os.environ.get(name) for name in USER_VARIABLES):
        return
    if torch.get_num_threads() in (len(cores), physical):
        torch.set_num_threads(max(1, free_threads(physical, os.getloadavg()[0]) // tp_size))


def free_threads(cores: int, load: float) -> int:
    """Return the number of physical cores that were free in the last minute, 1 to MAX_THREADS."""
    return max(1, min(MAX_THREADS, cores - round(load)))


def _siblings(core: int) -> str:
    """Return an id that all hardware threads of a physical core share."""
    try:
        return Path(SIBLINGS.format(core)).read_text()
    except OSError:  # hidden in some containers: each thread counts as a core
        return str(core)
