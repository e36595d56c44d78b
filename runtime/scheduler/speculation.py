"""One sequence's drafts: how many it may have, and how likely they are to hold."""

from dataclasses import dataclass, field

from .step_plan import DRAFT_SIZES, FORMER_ANSWERS, OWN_TOKENS, TRAINED_DRAFT

FIRST_ACCEPTANCE = 0.5
MEMORY = 8
"""Steps over which the moving averages go."""
MEMORY_OF_ALL = 64
"""The same for what new sequences are expected to accept."""
FORGOTTEN = 0.25
"""What is left of their weight when drafts are tried again."""


@dataclass(slots=True)
class Acceptance:
    """How likely a draft is to hold if those before it do: moving averages, over about `memory` steps that had drafts,
    of those that held and of those that were tried.
    """

    memory: int
    held: float = FIRST_ACCEPTANCE
    tried: float = 1.0

    @property
    def rate(self) -> float:
        """From 0 to 1."""
        return self.held / self.tried

    def note(self, drafts: int, accepted: int) -> None:
        """A step with drafts has come back: what came after the first that failed was not tried."""
        self.held += (accepted - self.held) / self.memory
        self.tried += (accepted + (accepted < drafts) - self.tried) / self.memory


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
    _shown: Acceptance = field(default_factory=lambda: Acceptance(MEMORY))

    @property
    def acceptance(self) -> float:
        """How likely a draft is to hold if those before it do."""
        return self._shown.rate

    def begin(self, acceptance: float) -> None:
        """What is expected before anything is known of it."""
        self._shown.held = acceptance * self._shown.tried

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
        self._shown.note(drafts, accepted)

    def doubt(self) -> None:
        """Drafts were not tried for long: what they show now counts for more than what was known."""
        self._shown.held, self._shown.tried = self.acceptance * FORGOTTEN, FORGOTTEN


class FirstAcceptances:
    """What a new sequence is expected to accept: what those before it have accepted, of the same adapter."""

    def __init__(self) -> None:
        self._of: dict[int, Acceptance] = {}

    def begin(self, speculation: Speculation, number: int) -> None:
        """A sequence begins to run; `number`: of its adapter, -1 = the base model."""
        known = self._of.get(number)
        if known is not None and not speculation.drafted:  # else it goes on, and what it has shown counts
            speculation.begin(known.rate)

    def note(self, number: int, drafts: int, accepted: int) -> None:
        """A step with drafts has come back."""
        self._of.setdefault(number, Acceptance(MEMORY_OF_ALL)).note(drafts, accepted)

    def forget(self, number: int) -> None:
        """Nothing uses the adapter any more."""
        self._of.pop(number, None)


def most_drafts(option: str | int) -> int:
    """The most drafts that a sequence gets with the option "off", "auto", or a number of drafts."""
    return option if isinstance(option, int) else DRAFT_SIZES[-1] if option == "auto" else 0


def speculation_of(option: str | int, most: int) -> Speculation | None:
    """What an option gives a sequence in an engine that gives none more than `most`."""
    drafts = min(most_drafts(option), most)
    return Speculation(drafts, option == "auto") if drafts else None
