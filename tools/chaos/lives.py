"""What each process holds as it grows older. A life is that of one process id."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .served import Holdings

WINDOW_SECONDS = 600.0
"""Caches and pools fill in the first ten minutes; what a process holds at its most in them is compared with its most in
its last ten. Single looks differ by what an allocator happens to keep."""
MOST_GROWTH = 0.01
SLACK_BYTES = 1 << 20
WARM_UP_SECONDS = 120.0
"""A younger process still meets things for the first time; nothing is said of its growth."""
MOST_YOUNG_GROWTH = 0.10
"""Of a process's resident bytes: the most in its last two minutes over the most in its first two."""
YOUNG_SLACK_BYTES = 32 << 20
"""Growth that an allocator's habits explain."""
SLACK_FILES = 8
SLACK_THREADS = 16
"""Pools that start at their first use."""


@dataclass
class Life:
    """One process: what it held at each look, and when (seconds)."""

    role: str
    looks: list[tuple[float, Holdings]]

    @property
    def seconds(self) -> float:
        """How long it was looked at."""
        return self.looks[-1][0] - self.looks[0][0]

    def first(self, seconds: float = WINDOW_SECONDS) -> Holdings:
        """The most in its first `seconds`."""
        return _most(held for when, held in self.looks if when - self.looks[0][0] <= seconds)

    def last(self, seconds: float = WINDOW_SECONDS) -> Holdings:
        """The most in its last `seconds`."""
        return _most(held for when, held in self.looks if self.looks[-1][0] - when <= seconds)


class Lives:
    """All processes of a run. `look` is called after each attack."""

    def __init__(self) -> None:
        self._lives: dict[int, Life] = {}

    def look(self, now: float, processes: Mapping[str, int]) -> None:
        """`now`: seconds of a monotonic clock. `processes`: role -> process id."""
        for role, pid in processes.items():
            held = Holdings.of(pid)
            if held is not None:
                self._lives.setdefault(pid, Life(role, [])).looks.append((now, held))

    def findings(self) -> list[str]:
        """What grew beyond its bounds within one life."""
        found = [finding for life in self._lives.values() for finding in grown(life)]
        return found + [
            f"{life.role}: {life.first().memory >> 20} MiB in its first ten minutes grew to "
            f"{life.last().memory >> 20} MiB"
            for life in self._old()
            if life.last().memory > life.first().memory * (1 + MOST_GROWTH) + SLACK_BYTES
        ]

    def table(self) -> list[str]:
        """A row for the longest life of each role from its first to its last look, and one for each life of more than
        two windows.
        """
        rows = [f"{'longest life':<22}{'lived, min':>11}{'MiB':>10}{'files':>10}{'threads':>10}"] if self._lives else []
        for role in sorted({life.role for life in self._lives.values()}):
            life = max((each for each in self._lives.values() if each.role == role), key=lambda each: each.seconds)
            first, last = life.looks[0][1], life.looks[-1][1]
            rows.append(
                f"{role:<22}{life.seconds / 60:>11.1f}{first.memory >> 20:>6}>{last.memory >> 20:<5}"
                f"{first.files:>4}>{last.files:<4}{first.threads:>5}>{last.threads:<4}"
            )
        old = self._old_table()
        return [*rows, "", *old] if old else rows

    def _old_table(self) -> list[str]:
        rows = [
            f"{'first > last ten minutes':<29}{'lived, min':>10}{'MiB':>14}{'growth':>9}{'files':>10}{'threads':>10}"
        ]
        for life in self._old():
            first, last = life.first(), life.last()
            rows.append(
                f"{life.role:<29}{life.seconds / 60:>10.1f}"
                f"{first.memory / 2**20:>7.1f}>{last.memory / 2**20:<6.1f}{last.memory / first.memory - 1:>8.2%}"
                f"{first.files:>6}>{last.files:<3}{first.threads:>6}>{last.threads:<3}"
            )
        return rows if len(rows) > 1 else []

    def _old(self) -> list[Life]:
        return [life for life in self._lives.values() if life.seconds >= 2 * WINDOW_SECONDS]


def grown(life: Life) -> list[str]:
    """What grew beyond its bounds after a life's warm-up; nothing for one that is too young to tell."""
    if life.seconds < 2 * WARM_UP_SECONDS:
        return []
    before, after = life.first(WARM_UP_SECONDS), life.last(WARM_UP_SECONDS)
    found = []
    if after.memory > before.memory * (1 + MOST_YOUNG_GROWTH) + YOUNG_SLACK_BYTES:
        found.append(f"{life.role}: {before.memory >> 20} MiB grew to {after.memory >> 20} MiB")
    if after.files > before.files + SLACK_FILES:
        found.append(f"{life.role}: {before.files} open files grew to {after.files}")
    if after.threads > before.threads + SLACK_THREADS:
        found.append(f"{life.role}: {before.threads} threads grew to {after.threads}")
    return found


def _most(held: Iterable[Holdings]) -> Holdings:
    """The most of each kind."""
    looks = list(held)
    return Holdings(*(max(getattr(each, name) for each in looks) for name in ("memory", "files", "threads")))
