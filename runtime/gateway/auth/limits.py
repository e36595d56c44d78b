"""How much a key may use: requests and tokens in a minute, tokens in a day. Pure; the clock is handed in.

What is promised: in no 60 seconds, wherever they begin, are more requests admitted than requests_per_minute, or
requests that together reserved more tokens than tokens_per_minute and have not given them back. A request reserves its
prompt and all that it may produce, and gives back at its end what it did not use. Tokens count at the time when their
request was admitted. What a request used beyond its reservation (an estimate of a prompt that was too low) is added at
its end, also above the limit, and later requests wait for it. A day is a calendar day in UTC.
"""

import math
from dataclasses import dataclass

MINUTE = 60.0
DAY = 86400.0
SLOTS = 60


class Window:
    """Amounts of the last minute, in one slot a second: 61 numbers for any count of requests.

    The slot in which a moment lies and the 60 before it cover every 60 seconds that end at the moment, so their sum is
    never less than what those hold.
    """

    def __init__(self) -> None:
        self._amounts = [0] * (SLOTS + 1)
        self._latest = 0
        self._sum = 0

    def used(self, now: float) -> int:
        """The sum at `now`, in seconds; time does not run backwards."""
        latest = max(int(now // (MINUTE / SLOTS)), self._latest)
        for slot in range(max(self._latest + 1, latest - SLOTS), latest + 1):
            self._sum -= self._amounts[slot % (SLOTS + 1)]
            self._amounts[slot % (SLOTS + 1)] = 0
        self._latest = latest
        return self._sum

    def add(self, amount: int, now: float) -> int:
        """Adds; the slot, for `give_back`."""
        self.used(now)
        self._amounts[self._latest % (SLOTS + 1)] += amount
        self._sum += amount
        return self._latest

    def give_back(self, amount: int, slot: int, now: float) -> None:
        """Takes an amount out of the slot that it was added to, unless that is over."""
        self.used(now)
        if slot >= self._latest - SLOTS:
            self._amounts[slot % (SLOTS + 1)] -= amount
            self._sum -= amount

    def seconds_until(self, room: int, limit: int, now: float) -> float:
        """Seconds until `room` more fit under the limit, if nothing is added or given back; inf: never."""
        left = self.used(now) + room - limit
        if left <= 0:
            return 0.0
        for slot in range(self._latest - SLOTS, self._latest + 1):
            left -= self._amounts[slot % (SLOTS + 1)]
            if left <= 0:
                return (slot + SLOTS + 1) * (MINUTE / SLOTS) - now
        return math.inf

    def seconds_until_empty(self, now: float) -> float:
        """Seconds until all of it is over, if nothing is added."""
        self.used(now)
        for slot in range(self._latest, self._latest - SLOTS - 1, -1):
            if self._amounts[slot % (SLOTS + 1)]:
                return (slot + SLOTS + 1) * (MINUTE / SLOTS) - now
        return 0.0


@dataclass(frozen=True)
class Limits:
    """What applies to a key; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a request is not admitted. `limit`: the limit's name in Limits; `seconds` until it would be, inf: never."""

    limit: str
    allowed: int
    asked: int
    seconds: float


@dataclass(frozen=True)
class Reservation:
    """What a request holds. `slot`: of the minute in which it was admitted; `day`: since the epoch."""

    tokens: int
    slot: int
    day: int


@dataclass(frozen=True)
class Standing:
    """Where a key stands with requests or tokens: the limit, what is left of it, seconds until all of it is there."""

    limit: int
    remaining: int
    reset_seconds: float


class Account:
    """What one key used. `tokens_today`: those of the day `day` that are known from before."""

    def __init__(self, day: int = 0, tokens_today: int = 0) -> None:
        self._requests = Window()
        self._tokens = Window()
        self._day = day
        self._today = tokens_today

    def largest(self, limits: Limits) -> int | None:
        """The most tokens that one request can ever reserve; None: there is no limit."""
        known = [limit for limit in (limits.tokens_per_minute, limits.tokens_per_day) if limit is not None]
        return min(known, default=None)

    def reserve(self, limits: Limits, tokens: int, now: float, wall: float) -> Reservation | Refusal:
        """Admit a request with so many tokens, all of them or none. now: of a clock that only goes forward; wall: since
        the epoch; both in seconds.
        """
        self._turn(wall)
        found: list[Refusal] = []
        for name, limit, window, amount in (
            ("requests_per_minute", limits.requests_per_minute, self._requests, 1),
            ("tokens_per_minute", limits.tokens_per_minute, self._tokens, tokens),
        ):
            if limit is not None and (seconds := window.seconds_until(amount, limit, now)) > 0:
                found.append(Refusal(name, limit, amount, seconds))
        limit = limits.tokens_per_day
        if limit is not None and self._today + tokens > limit:
            seconds = (self._day + 1) * DAY - wall if tokens <= limit else math.inf
            found.append(Refusal("tokens_per_day", limit, tokens, seconds))
        if found:
            return max(found, key=lambda refusal: refusal.seconds)
        self._requests.add(1, now)
        self._today += tokens
        return Reservation(tokens, self._tokens.add(tokens, now), self._day)

    def settle(self, reservation: Reservation, used: int, now: float, wall: float) -> None:
        """A request ended and used so many tokens: the rest of its reservation is given back."""
        self._turn(wall)
        rest = reservation.tokens - used
        if rest > 0:
            self._tokens.give_back(rest, reservation.slot, now)
        elif rest < 0:
            self._tokens.add(-rest, now)
        if reservation.day == self._day:
            self._today -= rest

    def requests(self, limits: Limits, now: float) -> Standing | None:
        """Where the key stands with requests; None: it has no such limit."""
        limit = limits.requests_per_minute
        return None if limit is None else _standing(limit, self._requests, now)

    def tokens(self, limits: Limits, now: float, wall: float) -> Standing | None:
        """Where the key stands with tokens: of the minute or of the day, whichever has less left."""
        self._turn(wall)
        found = []
        if limits.tokens_per_minute is not None:
            found.append(_standing(limits.tokens_per_minute, self._tokens, now))
        if limits.tokens_per_day is not None:
            left = max(0, limits.tokens_per_day - self._today)
            found.append(Standing(limits.tokens_per_day, left, (self._day + 1) * DAY - wall if self._today else 0.0))
        return min(found, key=lambda standing: standing.remaining, default=None)

    def _turn(self, wall: float) -> None:
        day = int(wall // DAY)
        if day > self._day:
            self._day, self._today = day, 0


def _standing(limit: int, window: Window, now: float) -> Standing:
    return Standing(limit, max(0, limit - window.used(now)), window.seconds_until_empty(now))


def headers(requests: Standing | None, tokens: Standing | None) -> dict[str, str]:
    """x-ratelimit-* as OpenAI spells them."""
    found: dict[str, str] = {}
    for what, standing in (("requests", requests), ("tokens", tokens)):
        if standing is not None:
            found[f"x-ratelimit-limit-{what}"] = str(standing.limit)
            found[f"x-ratelimit-remaining-{what}"] = str(standing.remaining)
            found[f"x-ratelimit-reset-{what}"] = duration(standing.reset_seconds)
    return found


def duration(seconds: float) -> str:
    """A time as OpenAI's reset headers have it: `120ms`, `6s`, `1m30s`, `23h59m59s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"
