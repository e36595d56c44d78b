"""Timing of garbage collection in a process."""

import gc
import time
from collections.abc import Callable

INTERVAL_SECONDS = 60.0
MIN_INTERVAL_FACTOR = 1000
"""The interval is at least this multiple of the last collection's processor time."""


def raise_gc_thresholds() -> None:
    """Collect less often. Importing torch creates a million permanent objects, and is a quarter slower with Python's
    default thresholds.
    """
    gc.set_threshold(50_000, 20, 100)


def exclude_loaded_objects() -> None:
    """Exclude what is loaded from collections, which would take milliseconds in the middle of a step."""
    gc.collect()
    gc.freeze()
    raise_gc_thresholds()


class PeriodicCollection:
    """Calls gc.collect() on a timer in a process that serves.

    Python's own thresholds count allocations minus deallocations. A server frees the objects of each request, so it
    reaches these thresholds only after hours. Until then each reference cycle keeps a page of memory in use.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._due = clock() + INTERVAL_SECONDS

    def collect_if_due(self) -> bool:
        """Collect if the interval has passed. Returns whether it has."""
        if self._clock() < self._due:
            return False
        begin = self._cpu_clock()  # on a busy machine a collection also waits
        gc.collect()
        self._due = self._clock() + max(INTERVAL_SECONDS, MIN_INTERVAL_FACTOR * (self._cpu_clock() - begin))
        return True
