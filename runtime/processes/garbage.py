"""How often a process looks for garbage in cycles."""

import gc
import time
from collections.abc import Callable

OFTEN_SECONDS = 60.0
MOST_OF_TIME = 1000
"""A look takes at most this part of the time."""


def collect_seldom() -> None:
    """Before a process loads torch: that makes a million objects which all stay, and by default Python looks through
    them so often that loading takes a quarter longer.
    """
    gc.set_threshold(50_000, 20, 100)


class GarbageLook:
    """Looks for garbage in cycles by the clock, in a process that serves.

    Python itself looks when some thousand more objects have come than gone. Where each request's objects go with it
    that takes hours, and until then the little that is left of some of them stays: one cycle keeps the page around it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = clock() + OFTEN_SECONDS

    def look(self) -> bool:
        """Look if it is time; returns whether it was."""
        begin = self._clock()
        if begin < self._due:
            return False
        gc.collect()
        end = self._clock()
        self._due = end + max(OFTEN_SECONDS, MOST_OF_TIME * (end - begin))
        return True
