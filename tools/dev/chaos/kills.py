"""SIGKILL and SIGSTOP of the server's processes at random moments."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence

from .served import ServedDemo

RESTART_SECONDS = 60.0
CHILDREN = ("batcher", "GPU process")
ALL_AT_ONCE = 0.25
"""Share of kills of all children at once."""


def kill(served: ServedDemo, source: random.Random, roles: Sequence[str] = CHILDREN) -> int:
    """Kill one of the children, sometimes all, and wait until their replacements answer."""
    chosen = list(roles) if source.random() < ALL_AT_ONCE else [source.choice(roles)]
    running = served.processes()
    victims = {role: running[role] for role in chosen if role in running}
    if not victims:
        return 0
    served.killed_at = time.monotonic()
    for victim in victims.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    end = time.monotonic() + RESTART_SECONDS
    while served.alive and not _replaced(victims, served.processes()):
        if time.monotonic() > end:
            raise TimeoutError(f"the {' and the '.join(victims)} did not start again within {RESTART_SECONDS:g} s")
        time.sleep(0.05)
    served.wait()
    served.back_at = time.monotonic()
    served.outages.append(served.back_at - served.killed_at)
    return 1


def _replaced(victims: Mapping[str, int], running: Mapping[str, int]) -> bool:
    return all(running.get(role, victim) != victim for role, victim in victims.items())


def freeze_one(served: ServedDemo, source: random.Random, seconds: float = 3.0) -> int:
    """SIGSTOP one of the children, and SIGCONT it after `seconds`."""
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
