"""The report of a run as one table."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .healthy import KINDS


@dataclass
class Line:
    """One attack: attempts, rounds, and problems."""

    name: str
    attempts: int = 0
    rounds: int = 0
    survived: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, attempts: int, surprises: list[str], fault: str | None) -> None:
        """Add a round: `surprises` that the server survived, and those it did not."""
        self.rounds += 1
        self.attempts += attempts
        self.findings += surprises if fault is None else [*surprises, fault]
        self.survived += fault is None


def delays(what: str, seconds: list[float]) -> list[str]:
    """Return one row with median and maximum of `seconds`; none without values."""
    if not seconds:
        return []
    return [f"{what:<44}{len(seconds):>6}{statistics.median(seconds):>10.2f}{max(seconds):>10.2f}"]


def table(
    lines: Mapping[str, Line], seen: Mapping[str, int], findings: Sequence[str], more: Sequence[Sequence[str]] = ()
) -> str:
    """Return the report: attacks, requests of the healthy clients, `more` tables if not empty, and findings."""
    rows = [f"{'attack':<22}{'rounds':>8}{'attempts':>10}{'survived':>10}{'findings':>10}"]
    rows += [
        f"{line.name:<22}{line.rounds:>8}{line.attempts:>10}{line.survived:>10}{len(line.findings):>10}"
        for line in lines.values()
    ]
    rows += ["", f"{'healthy requests':<22}{sum(seen.values()):>8}"]
    rows += [f"  {kind:<20}{seen.get(kind, 0):>8}" for kind in KINDS]
    for part in more:
        rows += ["", *part] if part else []
    rows += ["", "findings:" if findings else "no findings", *(f"  {finding}" for finding in findings)]
    return "\n".join(rows)
