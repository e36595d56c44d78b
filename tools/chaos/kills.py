"""SIGKILL and SIGSTOP of the server's processes, whichever moment it is."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence

from .served import ServedDemo

RESTART_SECONDS = 60.0
CHILDREN = ("batcher", "GPU process")


def kill_one(served: ServedDemo, source: random.Random, roles: Sequence[str] = CHILDREN) -> int:
    """SIGKILL for one of the children, and wait until another one answers in its place."""
    role = source.choice(roles)
    victim = served.processes().get(role)
    if victim is None:
        return 0
    served.killed_at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    end = time.monotonic() + RESTART_SECONDS
    while served.alive and served.processes().get(role, victim) == victim:
        if time.monotonic() > end:
            raise TimeoutError(f"the {role} was not started again within {RESTART_SECONDS:g} s")
        time.sleep(0.05)
    served.wait()
    served.back_at = time.monotonic()
    served.outages.append(served.back_at - served.killed_at)
    return 1


def freeze_one(served: ServedDemo, source: random.Random, seconds: float = 3.0) -> int:
    """SIGSTOP for one of the children, SIGCONT after `seconds`."""
    victim = served.processes().get(source.choice(CHILDREN))
    if victim is None:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(victim, signal.SIGCONT)
    served.wait()
    return 1
