"""Limits hold for any order of requests, and unused reservations are returned."""

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from sidestream.runtime.gateway.auth.limits import (
    DAY,
    Account,
    Limits,
    LimitStatus,
    Refusal,
    Reservation,
    Window,
    duration,
    limit_headers,
)


@dataclass
class Asked:
    """A request: seconds after the one before, tokens that it may use and those that it does, how long it runs."""

    gap: float
    tokens: int
    used: int
    runs: float


asked = st.builds(
    lambda gap, tokens, part, runs: Asked(gap, tokens, int(tokens * part), runs),
    st.sampled_from([0.0, 0.1, 0.999, 1.0, 3.7, 20.0, 59.0, 59.999, 60.0, 61.0, 200.0]),
    st.integers(1, 60),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.5, 10.0, 60.0, 61.5, 500.0]),
)


@given(st.lists(asked, max_size=40), st.integers(1, 6), st.integers(20, 100), st.floats(0, 5000))
@settings(max_examples=80, deadline=None)
def test_no_sixty_seconds_hold_more_than_the_limits(
    requests: list[Asked], most_requests: int, most_tokens: int, start: float
) -> None:
    limits = Limits(most_requests, most_tokens)
    account = Account()
    now = start
    running: list[tuple[float, Reservation, int, float]] = []  # end, reservation, tokens used, beginning
    admitted: list[tuple[float, int]] = []  # when, and the tokens used in the end
    counted: list[float] = []
    for request in requests:
        now += request.gap
        for ends, reservation, used, _ in sorted(running, key=lambda one: one[0]):
            if ends <= now:
                account.settle(reservation, used, ends, ends)
        running = [one for one in running if one[0] > now]
        if account.count(limits, now, now) is not None:
            assert counted, "who asks for the first time is counted"
            continue
        counted.append(now)
        held = account.reserve(limits, request.tokens, now, now)
        if isinstance(held, Refusal):
            alone = Account().reserve(limits, request.tokens, now, now)
            assert isinstance(alone, Refusal) or admitted, "who asks for the first time is refused for the size only"
            continue
        running.append((now + request.runs, held, request.used, now))
        admitted.append((now, request.used))
        assert sum(reservation.tokens for _, reservation, _, begun in running if begun > now - 60) <= most_tokens
    for begin, _ in admitted:
        inside = [used for when, used in admitted if begin <= when < begin + 60]
        assert sum(inside) <= most_tokens
    assert all(sum(begin <= when < begin + 60 for when in counted) <= most_requests for begin in counted)


@given(st.lists(asked, max_size=30))
@settings(max_examples=60, deadline=None)
def test_what_was_reserved_and_not_used_is_given_back(requests: list[Asked]) -> None:
    limits = Limits(None, 10_000, 10_000)
    account = Account()
    held = []
    for request in requests:
        one = account.reserve(limits, request.tokens, 7.0, 7.0)
        assert isinstance(one, Reservation)
        held.append((one, request.used))
    for one, used in reversed(held):
        account.settle(one, used, 50.0, 50.0)
    standing = account.token_status(limits, 50.0, 50.0)
    assert standing is not None and standing.remaining == 10_000 - sum(request.used for request in requests)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), min_size=1, max_size=30), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_refused_request_is_admitted_when_it_was_told_to_come_back(
    others: list[tuple[float, int]], tokens: int
) -> None:
    limits, account, now = Limits(8, 40), Account(), 0.0
    for gap, amount in others:
        now += gap
        account.reserve(limits, amount, now, now)
    held = account.reserve(limits, tokens, now, now)
    if isinstance(held, Refusal):
        assert 0 < held.seconds <= 61
        later = now + math.ceil(held.seconds)  # Retry-After has whole seconds
        assert isinstance(account.reserve(limits, tokens, later, later), Reservation)


def test_a_window_forgets_after_a_minute_and_takes_back_only_what_it_still_holds() -> None:
    window = Window()
    slot = window.add(5, 10.5)
    assert window.used(70.9) == 5 and window.used(71.0) == 0
    window.give_back(5, slot, 71.0)
    assert window.used(71.0) == 0
    window.add(2, 100_000.0)
    assert window.used(100_000.0) == 2 and window.seconds_until_empty(100_000.0) == 61.0


def test_a_day_ends_at_midnight_utc() -> None:
    limits, account = Limits(tokens_per_day=100), Account(day=10, tokens_today=70)
    evening = 10 * DAY + 86_000
    refused = account.reserve(limits, 31, 0.0, evening)
    assert refused == Refusal("tokens_per_day", 100, 31, 400.0)
    held = account.reserve(limits, 30, 0.0, evening)
    assert isinstance(held, Reservation)
    assert isinstance(account.reserve(limits, 100, 500.0, evening + 400), Reservation)
    account.settle(held, 0, 500.0, evening + 400)  # of yesterday: today's count is not made smaller
    assert account.token_status(limits, 500.0, evening + 400) == LimitStatus(100, 0, DAY)


def test_a_request_is_counted_only_while_a_token_is_left() -> None:
    limits, account = Limits(2, 100), Account()
    assert account.count(limits, 0.0, 0.0) is None
    held = account.reserve(limits, 100, 0.0, 0.0)
    assert isinstance(held, Reservation)
    refused = account.count(limits, 1.0, 1.0)
    assert isinstance(refused, Refusal) and refused.limit == "tokens_per_minute"
    account.settle(held, 10, 2.0, 2.0)
    assert account.count(limits, 2.0, 2.0) is None
    refused = account.count(limits, 2.0, 2.0)
    assert isinstance(refused, Refusal) and refused.limit == "requests_per_minute"


def test_what_can_never_be_admitted_is_told_apart() -> None:
    refused = Account().reserve(Limits(1, 100, 1000), 101, 0.0, 0.0)
    assert isinstance(refused, Refusal) and refused.limit == "tokens_per_minute" and math.isinf(refused.seconds)


def test_more_than_was_reserved_is_added_and_waited_for() -> None:
    limits, account = Limits(tokens_per_minute=100), Account()
    held = account.reserve(limits, 50, 0.0, 0.0)
    assert isinstance(held, Reservation)
    account.settle(held, 130, 30.0, 30.0)
    assert account.token_status(limits, 30.0, 30.0) == LimitStatus(100, 0, 61.0)
    assert isinstance(account.reserve(limits, 20, 60.5, 60.5), Refusal)
    assert isinstance(account.reserve(limits, 20, 61.0, 61.0), Reservation)


def test_headers_are_spelled_as_openai_spells_them() -> None:
    assert limit_headers(LimitStatus(60, 59, 1.0), LimitStatus(150_000, 149_984, 360.0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "150000",
        "x-ratelimit-remaining-tokens": "149984",
        "x-ratelimit-reset-tokens": "6m0s",
    }
    assert limit_headers(None, None) == {}
    assert [duration(seconds) for seconds in (0, 0.12, 59.1, 60, 86_399)] == [
        "0ms",
        "120ms",
        "1m0s",
        "1m0s",
        "23h59m59s",
    ]
