"""One sequence's drafts: how many it may have, and how likely they are to hold."""

from dataclasses import dataclass

from ..steps.plan import DRAFT_SIZES, FORMER_ANSWERS, OWN_TOKENS, TRAINED_DRAFT

FIRST_ACCEPTANCE = 0.5
MEMORY = 8
"""Steps over which the moving averages go."""
FORGOTTEN = 0.25
"""What is left of their weight when drafts are tried again."""


@dataclass(slots=True)
class Speculation:
    """One sequence's.

    most      drafts a step, at most
    adaptive  as many as pay for the step as a whole (see `drafting`), not as many as it may have
    drafted, accepted  drafts that were computed, and those of them that became output
    history_drafted, history_accepted  of both those that came from former answers
    trained_drafted, trained_accepted  of both those that a trained draft made
    """

    most: int
    adaptive: bool = False
    drafted: int = 0
    accepted: int = 0
    history_drafted: int = 0
    history_accepted: int = 0
    trained_drafted: int = 0
    trained_accepted: int = 0
    _held: float = FIRST_ACCEPTANCE
    _tried: float = 1.0

    @property
    def acceptance(self) -> float:
        """How likely a draft is to hold if those before it do: moving averages over the steps that had drafts."""
        return self._held / self._tried

    def note(self, drafts: int, accepted: int, source: int = OWN_TOKENS) -> None:
        """A step with drafts has come back; `source`: where they came from."""
        self.drafted += drafts
        self.accepted += accepted
        if source == FORMER_ANSWERS:
            self.history_drafted += drafts
            self.history_accepted += accepted
        elif source == TRAINED_DRAFT:
            self.trained_drafted += drafts
            self.trained_accepted += accepted
        # what came after the first that failed was not tried
        self._held += (accepted - self._held) / MEMORY
        self._tried += (accepted + (accepted < drafts) - self._tried) / MEMORY

    def doubt(self) -> None:
        """Drafts were not tried for long: what they show now counts for more than what was known."""
        self._held, self._tried = self.acceptance * FORGOTTEN, FORGOTTEN


def most_drafts(option: str | int) -> int:
    """The most drafts that a sequence gets with the option "off", "auto", or a number of drafts."""
    return option if isinstance(option, int) else DRAFT_SIZES[-1] if option == "auto" else 0


def speculation_of(option: str | int, most: int) -> Speculation | None:
    """What an option gives a sequence in an engine that gives none more than `most`."""
    drafts = min(most_drafts(option), most)
    return Speculation(drafts, option == "auto") if drafts else None
