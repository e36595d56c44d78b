"""How many drafts a sequence gets: as many as were asked for, or as many as pay."""

from dataclasses import dataclass

from ..steps.plan import DRAFT_SIZES

FIRST_RATE = 1.0
MEMORY = 8
"""Steps over which the moving average goes."""
WORTH = ((2.5, DRAFT_SIZES[2]), (0.8, DRAFT_SIZES[1]), (0.25, DRAFT_SIZES[0]))
"""Accepted drafts a step -> drafts of the next steps; with fewer than the last there are none."""
PAUSE = 64
"""Steps without drafts until one is tried again."""


@dataclass(slots=True)
class Speculation:
    """One sequence's.

    most      drafts a step, at most
    adaptive  fewer, down to none, where few are accepted
    drafted, accepted  drafts that were computed, and those of them that became output
    """

    most: int
    adaptive: bool = False
    drafted: int = 0
    accepted: int = 0
    _rate: float = FIRST_RATE
    _paused: int = 0

    def wanted(self) -> int:
        """Drafts of the next step; to be called once for each."""
        if not self.adaptive:
            return self.most
        for worth, drafts in WORTH:
            if self._rate >= worth:
                return min(drafts, self.most)
        self._paused += 1
        if self._paused >= PAUSE:
            self._paused, self._rate = 0, WORTH[-1][0]
        return 0

    def note(self, drafts: int, accepted: int) -> None:
        """A step with drafts has come back."""
        self.drafted += drafts
        self.accepted += accepted
        self._rate += (accepted - self._rate) / MEMORY


def most_drafts(option: str | int) -> int:
    """The most drafts that a sequence gets with the option "off", "auto", or a number of drafts."""
    return option if isinstance(option, int) else DRAFT_SIZES[-1] if option == "auto" else 0


def speculation_of(option: str | int, most: int) -> Speculation | None:
    """What an option gives a sequence in an engine that gives none more than `most`."""
    drafts = min(most_drafts(option), most)
    return Speculation(drafts, option == "auto") if drafts else None
