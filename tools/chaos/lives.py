"""What each process holds as it grows older. A life is that of one process id."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .served import Holdings

WINDOW_SECONDS = 600.0
"""Caches and pools fill in the first ten minutes; what a process holds at its most in them is compared with its most in
its last ten. Single looks differ by what an allocator happens to keep."""
MOST_GROWTH = 0.01
SLACK_BYTES = 1 << 20


@dataclass
class Life:
    """One process: what it held at each look, and when (seconds)."""

    role: str
    looks: list[tuple[float, Holdings]]

    @property
    def seconds(self) -> float:
        """How long it was looked at."""
        return self.looks[-1][0] - self.looks[0][0]

    @property
    def first(self) -> Holdings:
        """The most in the first ten minutes."""
        return _most(held for when, held in self.looks if when - self.looks[0][0] <= WINDOW_SECONDS)

    @property
    def last(self) -> Holdings:
        """The most in the last ten minutes."""
        return _most(held for when, held in self.looks if self.looks[-1][0] - when <= WINDOW_SECONDS)


class Lives:
    """All processes of a run. `look` is called after each round of attacks."""

    def __init__(self) -> None:
        self._lives: dict[int, Life] = {}

    def look(self, now: float, processes: Mapping[str, int]) -> None:
        """`now`: seconds of a monotonic clock. `processes`: role -> process id."""
        for role, pid in processes.items():
            held = Holdings.of(pid)
            if held is not None:
                self._lives.setdefault(pid, Life(role, [])).looks.append((now, held))

    def findings(self) -> list[str]:
        """Lives that grew by more than MOST_GROWTH."""
        return [
            f"{life.role}: {life.first.memory >> 20} MiB in its first ten minutes grew to {life.last.memory >> 20} MiB"
            for life in self._old()
            if life.last.memory > life.first.memory * (1 + MOST_GROWTH) + SLACK_BYTES
        ]

    def table(self) -> list[str]:
        """A row for each life of more than two windows; nothing if there is none."""
        rows = [
            f"{'first > last ten minutes':<29}{'lived, min':>10}{'MiB':>14}{'growth':>9}{'files':>10}{'threads':>10}"
        ]
        for life in self._old():
            first, last = life.first, life.last
            rows.append(
                f"{life.role:<29}{life.seconds / 60:>10.1f}"
                f"{first.memory / 2**20:>7.1f}>{last.memory / 2**20:<6.1f}{last.memory / first.memory - 1:>8.2%}"
                f"{first.files:>6}>{last.files:<3}{first.threads:>6}>{last.threads:<3}"
            )
        return rows if len(rows) > 1 else []

    def _old(self) -> list[Life]:
        return [life for life in self._lives.values() if life.seconds >= 2 * WINDOW_SECONDS]


def _most(held: Iterable[Holdings]) -> Holdings:
    """The most of each kind."""
    looks = list(held)
    return Holdings(*(max(getattr(each, name) for each in looks) for name in ("memory", "files", "threads")))
