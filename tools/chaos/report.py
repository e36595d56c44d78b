"""What was seen, as one table."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .served import Holdings

MOST_GROWTH = 0.10
"""Of a process's resident bytes between the end of the first round and the end of the last one."""
SLACK_BYTES = 32 << 20
"""Growth that an allocator's habits explain."""
SLACK_THREADS = 16
"""Pools that start at their first use; which of them a process has met differs from one life to the next."""


@dataclass
class Line:
    """One attack's row: how often it was tried, how many of its rounds the server survived, and what went wrong."""

    name: str
    attempts: int = 0
    rounds: int = 0
    survived: int = 0
    findings: list[str] = field(default_factory=list)


def growth(first: Mapping[str, Holdings], last: Mapping[str, Holdings]) -> list[str]:
    """What grew beyond its bounds between two looks at the same processes."""
    found = []
    for role in sorted(first.keys() & last.keys()):
        before, after = first[role], last[role]
        if after.memory > before.memory * (1 + MOST_GROWTH) + SLACK_BYTES:
            found.append(f"{role}: {before.memory >> 20} MiB grew to {after.memory >> 20} MiB")
        if after.files > before.files + 8:
            found.append(f"{role}: {before.files} open files grew to {after.files}")
        if after.threads > before.threads + SLACK_THREADS:
            found.append(f"{role}: {before.threads} threads grew to {after.threads}")
    return found


def delays(what: str, seconds: list[float]) -> list[str]:
    """One row with the median and the longest of `seconds`; nothing without any."""
    if not seconds:
        return []
    return [f"{what:<44}{len(seconds):>6}{statistics.median(seconds):>10.2f}{max(seconds):>10.2f}"]


def table(
    lines: Mapping[str, Line],
    seen: Mapping[str, int],
    findings: list[str],
    first: Mapping[str, Holdings],
    last: Mapping[str, Holdings],
    more: Sequence[str] = (),
) -> str:
    """The report: a row an attack, then the healthy clients' requests, what the processes hold, `more` rows, and the
    findings.
    """
    rows = [f"{'attack':<22}{'rounds':>8}{'attempts':>10}{'survived':>10}{'findings':>10}"]
    rows += [
        f"{line.name:<22}{line.rounds:>8}{line.attempts:>10}{line.survived:>10}{len(line.findings):>10}"
        for line in lines.values()
    ]
    total = sum(seen.values())
    rows += [
        "",
        f"{'healthy requests':<22}{total:>8}",
        *(f"  {kind:<20}{seen.get(kind, 0):>8}" for kind in ("right", "told", "wrong", "lost")),
        "",
        f"{'process':<22}{'MiB':>8}{'files':>10}{'threads':>10}",
    ]
    for role, after in last.items():
        before = first.get(role, after)
        rows.append(
            f"{role:<22}{before.memory >> 20:>4}>{after.memory >> 20:<4}{before.files:>5}>{after.files:<4}"
            f"{before.threads:>5}>{after.threads:<4}"
        )
    rows += ["", *more] if more else []
    found = [f"{line.name}: {finding}" for line in lines.values() for finding in dict.fromkeys(line.findings)]
    found += findings
    rows += ["", "no findings" if not found else "findings:", *(f"  {finding}" for finding in found)]
    return "\n".join(rows)
