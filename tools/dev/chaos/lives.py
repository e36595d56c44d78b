"""Memory, files and threads of each process over its life (that of one process id).

A single look may see a temporary peak: a long prompt in tokenization needs 250 MiB. The minimum over some minutes is
compared: leaks raise it, temporary memory does not.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from .served import Holdings

WARM_UP_SECONDS = 600.0
"""Seconds of warm-up, in which caches and pools fill."""
WINDOW_SECONDS = 300.0
"""Seconds: the window after the warm-up is compared with the last one."""
MOST_GROWTH = 0.01
SLACK_BYTES = 1 << 20
ROUNDS = 8
STEADY_BYTES = 1 << 20
"""Fewest rounds to judge: caches grow in a few rounds, leaks in most of them."""
SLACK_FILES = 8
SLACK_THREADS = 16
"""Pools that start at their first use."""


@dataclass
class Life:
    """One process: at each look its age in seconds, the round of attacks, and its holdings."""

    role: str
    started: float
    looks: list[tuple[float, int, Holdings]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return the seconds of observation."""
        return self.looks[-1][0]

    @property
    def is_old(self) -> bool:
        """Return whether the last window can be compared with that after the warm-up."""
        return self.seconds >= WARM_UP_SECONDS + 2 * WINDOW_SECONDS

    def early(self) -> Holdings:
        """Return its holdings after the warm-up; of a young life in its first third."""
        begin, length = (WARM_UP_SECONDS, WINDOW_SECONDS) if self.is_old else (0.0, self.seconds / 3)
        return _least(held for age, _, held in self.looks if begin <= age <= begin + length)

    def late(self) -> Holdings:
        """Return its holdings at the end."""
        length = WINDOW_SECONDS if self.is_old else self.seconds / 3
        return _least(held for age, _, held in self.looks if age >= self.seconds - length)

    @property
    def growth(self) -> float:
        """Return the growth of its memory from the window after the warm-up to the last one, as a share."""
        return self.late().memory / self.early().memory - 1

    def steady_growth(self) -> float:
        """Return bytes of growth per round: the median step between the minima of rounds, without the first two.

        It is 0 for fewer than ROUNDS rounds.
        """
        rounds: dict[int, int] = {}
        for _, number, held in self.looks:
            rounds[number] = min(rounds.get(number, held.memory), held.memory)
        kept = [rounds[number] for number in sorted(rounds)][2:]
        if len(rounds) < ROUNDS:
            return 0.0
        return statistics.median(after - before for before, after in pairwise(kept))


class Lives:
    """All processes of a run; `look` is called after each attack."""

    def __init__(self) -> None:
        self._lives: dict[int, Life] = {}

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def look(self, now: float, number: int, processes: Mapping[str, int]) -> None:
        """Record holdings; `now`: monotonic seconds, `number`: of the round, `processes`: role -> process id."""
        for role, pid in processes.items():
            held = Holdings.of(pid)
            if held is not None:
                life = self._lives.setdefault(pid, Life(role, now))
                life.looks.append((now - life.started, number, held))

    def findings(self) -> list[str]:
        """Return growth beyond the bounds within one life."""
        return [finding for life in self._lives.values() for finding in grown(life)]

    def table(self) -> list[str]:
        """Return a row for each old life, and for the longest life of each other role."""
        if not self._lives:
            return []
        rows = [
            f"{'kept by':<16}{'lived, min':>11}{'rounds':>8}{'MiB, early > late':>20}{'growth':>9}{'most':>7}"
            f"{'files':>10}{'threads':>10}"
        ]
        for role in sorted({life.role for life in self._lives.values()}):
            lives = [life for life in self._lives.values() if life.role == role]
            old = [life for life in lives if life.is_old]
            rows += [_row(life) for life in old or [max(lives, key=lambda each: each.seconds)]]
        return rows


def grown(life: Life) -> list[str]:
    """Return growth beyond the bounds; a young life of few rounds is not judged."""
    found = []
    steady = life.steady_growth()
    if steady > STEADY_BYTES:
        found.append(f"{life.role}: keeps {steady / 2**20:.1f} MiB more with each round")
    if not life.is_old:
        return found
    before, after = life.early(), life.late()
    if after.memory > before.memory * (1 + MOST_GROWTH) + SLACK_BYTES:
        found.append(f"{life.role}: {before.memory >> 20} MiB after ten minutes grew to {after.memory >> 20} MiB")
    if after.files > before.files + SLACK_FILES:
        found.append(f"{life.role}: {before.files} open files grew to {after.files}")
    if after.threads > before.threads + SLACK_THREADS:
        found.append(f"{life.role}: {before.threads} threads grew to {after.threads}")
    return found


def _row(life: Life) -> str:
    early, late, most = life.early(), life.late(), max(held.memory for _, _, held in life.looks)
    return (
        f"{life.role:<16}{life.seconds / 60:>11.1f}{len({number for _, number, _ in life.looks}):>8}"
        f"{early.memory / 2**20:>11.1f} > {late.memory / 2**20:<6.1f}{life.growth:>9.2%}"
        f"{most >> 20:>7}{early.files:>6}>{late.files:<3}{early.threads:>6}>{late.threads:<3}"
    )


def _least(held: Iterable[Holdings]) -> Holdings:
    """Return the minimum of each kind."""
    looks = list(held)
    return Holdings(*(min(getattr(each, name) for each in looks) for name in ("memory", "files", "threads")))
