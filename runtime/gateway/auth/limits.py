"""Limits of a key: requests and tokens per minute, tokens per day. Pure; callers pass the clock.

In any 60 seconds at most requests_per_minute requests are admitted, and their reservations sum to at most
tokens_per_minute. A request is counted before its body is read, which fails if no token is left. It reserves its prompt
and its longest answer once they are known, and returns unused tokens when it ends. Tokens
count at the time of admission. If a prompt was estimated too low, the difference is added at the end, even above the
limit, and delays later requests. A day is a calendar day in UTC.
"""

import math
from dataclasses import dataclass

MINUTE = 60.0
DAY = 86400.0
SLOTS = 60


class Window:
    """Sum of the amounts of the last minute, in 61 slots of one second.

    The current slot and the 60 before it cover the last 60 seconds, so the sum is never too low.
    """

    def __init__(self) -> None:
        self._amounts = [0] * (SLOTS + 1)
        self._latest = 0
        self._sum = 0

    def used(self, now: float) -> int:
        """Return the sum at `now` (seconds, monotonic)."""
        latest = int(now // (MINUTE / SLOTS))
        if latest <= self._latest:
            return self._sum
        for slot in range(max(self._latest + 1, latest - SLOTS), latest + 1):
            self._sum -= self._amounts[slot % (SLOTS + 1)]
            self._amounts[slot % (SLOTS + 1)] = 0
        self._latest = latest
        return self._sum

    def add(self, amount: int, now: float) -> int:
        """Add an amount. Returns its slot for `give_back`."""
        self.used(now)
        self._amounts[self._latest % (SLOTS + 1)] += amount
        self._sum += amount
        return self._latest

    def give_back(self, amount: int, slot: int, now: float) -> None:
        """Subtract an amount from its slot, unless that is older than a minute."""
        self.used(now)
        if slot >= self._latest - SLOTS:
            self._amounts[slot % (SLOTS + 1)] -= amount
            self._sum -= amount

    def seconds_until(self, amount: int, limit: int, now: float) -> float:
        """Return the seconds until `amount` more fits under the limit, if nothing else changes; inf: never."""
        left = self.used(now) + amount - limit
        if left <= 0:
            return 0.0
        for slot in range(self._latest - SLOTS, self._latest + 1):
            left -= self._amounts[slot % (SLOTS + 1)]
            if left <= 0:
                return (slot + SLOTS + 1) * (MINUTE / SLOTS) - now
        return math.inf

    def seconds_until_empty(self, now: float) -> float:
        """Return the seconds until the sum is 0, if nothing is added."""
        self.used(now)
        for slot in range(self._latest, self._latest - SLOTS - 1, -1):
            if self._amounts[slot % (SLOTS + 1)]:
                return (slot + SLOTS + 1) * (MINUTE / SLOTS) - now
        return 0.0


@dataclass(frozen=True)
class Limits:
    """Limits of a key; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused. `limit`: name of a field of Limits; `seconds`: time until it fits, inf: never."""

    limit: str
    allowed: int
    requested: int
    seconds: float


@dataclass(frozen=True)
class Reservation:
    """Reserved tokens of a request. `slot`: of the token window; `day`: since the epoch."""

    tokens: int
    slot: int
    day: int


@dataclass(frozen=True)
class LimitStatus:
    """State of a limit on requests or tokens, for the x-ratelimit-* headers."""

    limit: int
    remaining: int
    reset_seconds: float


class Account:
    """Usage of one key. `tokens_today`: initial sum of the day `day`."""

    def __init__(self, day: int = 0, tokens_today: int = 0) -> None:
        self._requests = Window()
        self._tokens = Window()
        self._day = day
        self._today = tokens_today

    def largest(self, limits: Limits) -> int | None:
        """Return the largest possible reservation of tokens; None: no limit."""
        token_limits = [limit for limit in (limits.tokens_per_minute, limits.tokens_per_day) if limit is not None]
        return min(token_limits, default=None)

    def count(self, limits: Limits, now: float, wall: float) -> Refusal | None:
        """Count a request, or return why it is refused. Some token must be left, but none is reserved.

        now, wall   seconds of a monotonic clock, and since the epoch
        """
        refusal = self._refusal(limits, 1, 1, now, wall)
        if refusal is None:
            self._requests.add(1, now)
        return refusal

    def reserve(self, limits: Limits, tokens: int, now: float, wall: float) -> Reservation | Refusal:
        """Reserve tokens for a counted request, or return why that is refused."""
        refusal = self._refusal(limits, 0, tokens, now, wall)
        if refusal is not None:
            return refusal
        self._today += tokens
        return Reservation(tokens, self._tokens.add(tokens, now), self._day)

    def _refusal(self, limits: Limits, requests: int, tokens: int, now: float, wall: float) -> Refusal | None:
        self._start_day(wall)
        refusals: list[Refusal] = []
        limit = limits.requests_per_minute
        if limit is not None and requests and (seconds := self._requests.seconds_until(requests, limit, now)) > 0:
            refusals.append(Refusal("requests_per_minute", limit, requests, seconds))
        limit = limits.tokens_per_minute
        if limit is not None and (seconds := self._tokens.seconds_until(tokens, limit, now)) > 0:
            refusals.append(Refusal("tokens_per_minute", limit, tokens, seconds))
        limit = limits.tokens_per_day
        if limit is not None and self._today + tokens > limit:
            seconds = (self._day + 1) * DAY - wall if tokens <= limit else math.inf
            refusals.append(Refusal("tokens_per_day", limit, tokens, seconds))
        return max(refusals, key=lambda refusal: refusal.seconds) if refusals else None

    def settle(self, reservation: Reservation, used: int, now: float, wall: float) -> None:
        """Correct the sums for a request that ended and used `used` tokens."""
        self._start_day(wall)
        unused = reservation.tokens - used
        if unused > 0:
            self._tokens.give_back(unused, reservation.slot, now)
        elif unused < 0:
            self._tokens.add(-unused, now)
        if reservation.day == self._day:
            self._today -= unused

    def request_status(self, limits: Limits, now: float) -> LimitStatus | None:
        """Return the state of the limit on requests; None: no limit."""
        limit = limits.requests_per_minute
        return None if limit is None else _status_of(limit, self._requests, now)

    def token_status(self, limits: Limits, now: float, wall: float) -> LimitStatus | None:
        """Return the state of the limit on tokens, per minute or day, whichever has fewer left; None: no limit."""
        self._start_day(wall)
        states = []
        if limits.tokens_per_minute is not None:
            states.append(_status_of(limits.tokens_per_minute, self._tokens, now))
        if limits.tokens_per_day is not None:
            left = max(0, limits.tokens_per_day - self._today)
            states.append(
                LimitStatus(limits.tokens_per_day, left, (self._day + 1) * DAY - wall if self._today else 0.0)
            )
        return min(states, key=lambda status: status.remaining, default=None)

    def _start_day(self, wall: float) -> None:
        day = int(wall // DAY)
        if day > self._day:
            self._day, self._today = day, 0


def _status_of(limit: int, window: Window, now: float) -> LimitStatus:
    return LimitStatus(limit, max(0, limit - window.used(now)), window.seconds_until_empty(now))


def limit_headers(requests: LimitStatus | None, tokens: LimitStatus | None) -> dict[str, str]:
    """Return the x-ratelimit-* headers."""
    headers: dict[str, str] = {}
    for unit, status in (("requests", requests), ("tokens", tokens)):
        if status is not None:
            headers[f"x-ratelimit-limit-{unit}"] = str(status.limit)
            headers[f"x-ratelimit-remaining-{unit}"] = str(status.remaining)
            headers[f"x-ratelimit-reset-{unit}"] = duration(status.reset_seconds)
    return headers


def duration(seconds: float) -> str:
    """Format seconds for a reset header: `120ms`, `6s`, `1m30s`, `23h59m59s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"
