"""Check answers against changes of adapters that overlap in time: a regular register for each name."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

APART = 0.25
"""Seconds between two changes after which the second one has a later stamp, whatever the skew of the clocks."""


@dataclass(eq=False)
class Change:
    """A change of one name to a version; None: unloaded.

    started, ended   seconds; `ended` is infinite while it is in progress
    acknowledged     time of its success, infinite without one
    everywhere       made through a gateway: all engines have it when it is acknowledged
    """

    value: str | None
    started: float
    ended: float = math.inf
    acknowledged: float = math.inf
    everywhere: bool = True

    def precedes(self, other: "Change") -> bool:
        """Return whether it ended before the other one began."""
        return self.ended + APART < other.started


def possible(changes: Iterable[Change], started: float, ended: float, everywhere: bool = True) -> set[str | None]:
    """Return the versions that may answer a request: of changes that began before its end and are not followed by one
    that was acknowledged before its start. With `everywhere` only changes through gateways count as followers.
    """
    begun = [Change(None, -math.inf, -math.inf), *(each for each in changes if each.started <= ended)]
    done = [each for each in begun if each.acknowledged <= started and (each.everywhere or not everywhere)]
    last = max((each.started for each in done if each.acknowledged < math.inf), default=-math.inf)
    return {each.value for each in begun if each.ended + APART >= last}


def prune(changes: list[Change], started: float) -> None:
    """Remove the changes that are not possible for requests that begin at `started` or later."""
    last = max((each.started for each in changes if each.acknowledged <= started), default=-math.inf)
    changes[:] = [each for each in changes if each.ended + APART >= last]
