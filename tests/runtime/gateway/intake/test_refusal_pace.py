"""Refusals of an owner beyond a burst are spaced, and those of others are not."""

from sidestream.runtime.gateway.intake import refusal_pace
from sidestream.runtime.gateway.intake.refusal_pace import BURST, MAX_SECONDS, PER_SECOND, RefusalPace


def test_a_burst_is_answered_at_once_and_what_follows_is_spaced() -> None:
    pace = RefusalPace()
    assert [pace.delay("a", 5.0) for _ in range(BURST)] == [0.0] * BURST
    assert abs(pace.delay("a", 5.0) - 1 / PER_SECOND) < 1e-9
    assert pace.delay("b", 5.0) == 0.0
    assert max(pace.delay("a", 5.0) for _ in range(1000)) == MAX_SECONDS, "however many there are"
    assert pace.delay("a", 5.0 + MAX_SECONDS + BURST / PER_SECOND) == 0.0


def test_owners_are_forgotten() -> None:
    pace = RefusalPace()
    for owner in range(2 * refusal_pace.MAX_OWNERS):
        pace.delay(str(owner), 1.0)
    assert len(pace._next) == refusal_pace.MAX_OWNERS
