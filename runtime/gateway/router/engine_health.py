"""Whether an engine is used, and when again after it failed."""

from dataclasses import dataclass

FIRST_REST = 0.25
LONGEST_REST = 30.0


@dataclass(slots=True)
class Standing:
    """What is known of one engine's health; times are seconds of the caller's clock.

    status    what it said last, or `lost` when it cannot be reached
    strikes   how often it was lost since it last finished an answer
    rests_until   it gets nothing before this time, whatever it says
    """

    status: str = "lost"
    strikes: int = 0
    rests_until: float = 0.0

    def lost(self, now: float) -> None:
        """It died or cannot be reached: each time in a row it rests twice as long after it is back."""
        if self.status in ("ok", "stalled"):
            self.strikes += 1
            self.rests_until = now + min(LONGEST_REST, FIRST_REST * 2.0 ** min(self.strikes - 1, 16))
        self.status = "lost"

    def answered(self) -> None:
        """It finished an answer: its losses were no fault that lasts."""
        self.strikes, self.rests_until = 0, 0.0

    def usable(self, now: float) -> bool:
        """Whether it may be given requests."""
        return self.status == "ok" and now >= self.rests_until
