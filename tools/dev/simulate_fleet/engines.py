"""Engines that batch, load adapters and queue, without computing.

All running requests of an engine get a token in each step, so an engine is a clock of steps that slows down with its
load; a request ends after its tokens. An adapter that is not on the GPU is copied there first, into the least recently
used slot; requests wait while all slots are in use.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from .steps import StepTimes


@dataclass(frozen=True)
class Sizes:
    """Of each engine: requests at once, adapters on the GPU, seconds to copy an adapter from host memory."""

    capacity: int = 128
    slots: int = 32
    load_seconds: float = 0.02


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: its time, its adapter, tokens of prompt and answer."""

    at: float
    adapter: int
    prompt: int
    tokens: int


@dataclass(eq=False, slots=True)
class Served:
    """A request at an engine. `held`: its adapter was on the GPU on arrival; `first`: seconds to its first token."""

    arrival: Arrival
    held: bool
    first: float = 0.0


class Policy(Protocol):
    """Chooses the engine of a request."""

    def choose(self, arrival: Arrival) -> int:
        """Return the engine's number."""
        ...

    def ended(self, engine: int, arrival: Arrival, now: float) -> None:
        """A request has ended."""

    def tick(self, now: float, engines: "list[Engine]") -> None:
        """Engines report, every half second."""


class Engine:
    """One engine. Times are seconds since the simulation's start."""

    def __init__(self, sizes: Sizes, times: StepTimes) -> None:
        self.sizes, self.times = sizes, times
        self.slots: dict[int, int] = {}  # adapter -> requests that use it; least recently used first
        self._users: dict[int, int] = {}  # of running requests
        self._ends: list[tuple[float, int, Served]] = []
        self._waiting: deque[Served] = deque()
        self._clock, self._at, self._begun = 0.0, 0.0, 0

    @property
    def open(self) -> int:
        """Return running and waiting requests."""
        return len(self._ends) + len(self._waiting)

    def add(self, arrival: Arrival) -> Served:
        """Add a request."""
        self._advance(arrival.at)
        served = Served(arrival, arrival.adapter in self.slots)
        self._waiting.append(served)
        self._admit(arrival.at)
        return served

    def next_end(self) -> float | None:
        """Return the time at which the next request ends."""
        return None if not self._ends else self._at + max(0.0, self._ends[0][0] - self._clock) * self._step()

    def end_one(self, now: float) -> Served:
        """End the next request."""
        self._advance(now)
        _, _, served = heappop(self._ends)
        adapter = served.arrival.adapter
        self.slots[adapter] -= 1
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
        self._admit(now)
        return served

    def _step(self) -> float:
        return self.times.step(len(self._ends), len(self._users))

    def _advance(self, now: float) -> None:
        if self._ends and now > self._at:
            self._clock += (now - self._at) / self._step()
        self._at = now

    def _admit(self, now: float) -> None:
        passed: deque[Served] = deque()
        while self._waiting and len(self._ends) < self.sizes.capacity:
            served = self._waiting.popleft()
            wait = self._take_slot(served.arrival.adapter)
            if wait is None:  # others overtake it
                passed.append(served)
                continue
            arrival = served.arrival
            self._begun += 1
            self._users[arrival.adapter] = self._users.get(arrival.adapter, 0) + 1
            ahead = wait + arrival.prompt * self.times.prompt
            step = self.times.step(len(self._ends) + 1, len(self._users))
            served.first = now - arrival.at + ahead + step
            heappush(self._ends, (self._clock + ahead / step + arrival.tokens, self._begun, served))
        self._waiting.extendleft(reversed(passed))

    def _take_slot(self, adapter: int) -> float | None:
        """Return seconds until the adapter is on the GPU; None while no slot is free."""
        users = self.slots.pop(adapter, None)
        if users is not None:
            self.slots[adapter] = users + 1
            return 0.0
        if len(self.slots) >= self.sizes.slots:
            unused = next((other for other, count in self.slots.items() if not count), None)
            if unused is None:
                return None
            del self.slots[unused]
        self.slots[adapter] = 1
        return self.sizes.load_seconds


def simulate(arrivals: list[Arrival], engines: list[Engine], policy: Policy, tick: float = 0.5) -> list[Served]:
    """Return all requests in order of arrival."""
    served: list[Served] = []
    agenda: list[tuple[float, int]] = []  # when an engine's next request may end; checked again then
    next_tick = 0.0

    def plan(number: int) -> None:
        end = engines[number].next_end()
        if end is not None:
            heappush(agenda, (end, number))

    for arrival in arrivals:
        while agenda and agenda[0][0] <= arrival.at:
            now, number = heappop(agenda)
            end = engines[number].next_end()
            if end is not None and end <= now + 1e-9:
                policy.ended(number, engines[number].end_one(now).arrival, now)
                plan(number)
        if arrival.at >= next_tick:
            policy.tick(arrival.at, engines)
            next_tick = arrival.at + tick
        number = policy.choose(arrival)
        served.append(engines[number].add(arrival))
        plan(number)
    return served
