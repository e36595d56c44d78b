"""Engines that batch, load adapters and queue, without computing.

An engine is a clock of steps, each as long as its tokens take. A request ends after its prompt and its tokens. An
adapter that is not on the GPU is copied there first, into the least recently used slot; requests wait while all slots
are in use.
"""

import math
import random
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from sidestream.runtime.gateway.router.load_balancer import EngineReport, LoadBalancer


@dataclass(frozen=True)
class StepTimes:
    """`step`: seconds of a decode step for each request and each adapter; `prompt`: seconds per token of a prompt."""

    first: float = 0.002
    more: float = 1e-5
    prompt: float = 1e-5

    def step(self, sequences: int, adapters: int) -> float:
        """Return seconds."""
        return self.first + self.more * (sequences + adapters)


@dataclass(frozen=True)
class Sizes:
    """Of each engine: requests at once, tokens of a step, adapters on the GPU, seconds to copy an adapter there."""

    capacity: int = 128
    step_tokens: int = 8192
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


@dataclass(eq=False, slots=True)
class Prompt:
    """An admitted request: time from which its adapter is on the GPU, and tokens of its prompt to compute."""

    served: Served
    ready: float
    left: int


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
    """One engine. Times are seconds since the simulation's start.

    A step has a token for each request that decodes, then prompts in order of admission, in chunks, up to
    `sizes.step_tokens`, as the scheduler fills it. It takes the time of its decoding and of its prompt tokens.
    """

    def __init__(self, sizes: Sizes, times: StepTimes) -> None:
        self.sizes, self.times = sizes, times
        self.slots: dict[int, int] = {}  # adapter -> requests that use it; least recently used first
        self.step_end: float | None = None
        """End of the current step, or of the copy that all wait for; None: nothing to do."""
        self._users: dict[int, int] = {}  # of requests that decode
        self._ends: list[tuple[int, int, Served]] = []  # of requests that decode: last step, serial number
        self._prompts: list[Prompt] = []
        self._waiting: deque[Served] = deque()
        self._steps, self._serial = 0, 0  # steps that decoded, requests whose prompts ended
        self._decodes = self._computes = False  # whether the current step does
        self._done: list[Served] = []  # prompts that the current step completes

    @property
    def open(self) -> int:
        """Return running and waiting requests."""
        return len(self._ends) + len(self._prompts) + len(self._done) + len(self._waiting)

    def add(self, arrival: Arrival) -> Served:
        """Add a request. It waits for the end of the current step."""
        served = Served(arrival, arrival.adapter in self.slots)
        self._waiting.append(served)
        if not self._computes:
            self._start_step(arrival.at)
        return served

    def end_step(self) -> list[Served]:
        """End the current step, start the next one, and return the requests that ended."""
        now = self.step_end
        if now is None:
            return []
        self._steps += self._decodes
        for served in self._done:
            served.first = now - served.arrival.at
            adapter = served.arrival.adapter
            self._users[adapter] = self._users.get(adapter, 0) + 1
            self._serial += 1
            heappush(self._ends, (self._steps + served.arrival.tokens - 1, self._serial, served))
        self._done = []
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            *_, served = heappop(self._ends)
            adapter = served.arrival.adapter
            self.slots[adapter] -= 1
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]
            ended.append(served)
        self._start_step(now)
        return ended

    def _start_step(self, now: float) -> None:
        self._admit(now)
        left, chunks = self.sizes.step_tokens - len(self._ends), 0
        for prompt in self._prompts:
            if prompt.ready <= now and left > 0:
                count = min(left, prompt.left)
                prompt.left -= count
                left, chunks = left - count, chunks + count
        self._done = [prompt.served for prompt in self._prompts if not prompt.left]
        self._prompts = [prompt for prompt in self._prompts if prompt.left]
        self._decodes = bool(self._ends)
        self._computes = self._decodes or chunks > 0
        if self._computes:
            decode = self.times.step(len(self._ends), len(self._users)) if self._decodes else 0.0
            self.step_end = now + decode + chunks * self.times.prompt
        else:
            self.step_end = min((prompt.ready for prompt in self._prompts), default=None)

    def _admit(self, now: float) -> None:
        passed: deque[Served] = deque()
        while self._waiting and len(self._ends) + len(self._prompts) < self.sizes.capacity:
            served = self._waiting.popleft()
            wait = self._take_slot(served.arrival.adapter)
            if wait is None:  # others overtake it
                passed.append(served)
            else:
                self._prompts.append(Prompt(served, now + wait, served.arrival.prompt))
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
    agenda: list[tuple[float, int]] = []  # ends of steps; some have become earlier since
    next_tick = 0.0

    def advance(until: float) -> None:
        while agenda and agenda[0][0] <= until:
            now, number = heappop(agenda)
            engine = engines[number]
            if engine.step_end != now:
                continue
            for ended in engine.end_step():
                policy.ended(number, ended.arrival, now)
            if engine.step_end is not None:
                heappush(agenda, (engine.step_end, number))

    for arrival in arrivals:
        advance(arrival.at)
        if arrival.at >= next_tick:
            policy.tick(arrival.at, engines)
            next_tick = arrival.at + tick
        number = policy.choose(arrival)
        before = engines[number].step_end
        served.append(engines[number].add(arrival))
        after = engines[number].step_end
        if after is not None and after != before:
            heappush(agenda, (after, number))
    advance(math.inf)
    return served


class RoundRobin:
    """Round robin."""

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0

    def choose(self, arrival: Arrival) -> int:
        """See `Policy`."""
        self._next = (self._next + 1) % self._count
        return self._next

    def ended(self, engine: int, arrival: Arrival, now: float) -> None:
        """See `Policy`."""

    def tick(self, now: float, engines: list[Engine]) -> None:
        """See `Policy`."""


class TwoChoices:
    """The less loaded of two random engines."""

    def __init__(self, count: int, seed: int) -> None:
        self._source, self._open = random.Random(seed), [0] * count

    def choose(self, arrival: Arrival) -> int:
        """See `Policy`."""
        one, other = (self._source.randrange(len(self._open)) for _ in range(2))
        chosen = one if self._open[one] <= self._open[other] else other
        self._open[chosen] += 1
        return chosen

    def ended(self, engine: int, arrival: Arrival, now: float) -> None:
        """See `Policy`."""
        self._open[engine] -= 1

    def tick(self, now: float, engines: list[Engine]) -> None:
        """See `Policy`."""


class Routed:
    """The router's load balancer."""

    def __init__(self, count: int, sizes: Sizes, seed: int) -> None:
        self._balancer, self._sizes = LoadBalancer(source=random.Random(seed)), sizes
        self._names = [str(number) for number in range(count)]
        for name in self._names:
            self._balancer.add(name)

    def choose(self, arrival: Arrival) -> int:
        """See `Policy`."""
        adapter = str(arrival.adapter)
        choice = self._balancer.choose(adapter, (), arrival.at)
        if choice is None:
            raise RuntimeError("all engines are up, and the load balancer chooses none")
        self._balancer.start_request(choice.engine, adapter, (), arrival.at)
        return int(choice.engine)

    def ended(self, engine: int, arrival: Arrival, now: float) -> None:
        """See `Policy`."""
        self._balancer.finish_request(self._names[engine], True, now)

    def tick(self, now: float, engines: list[Engine]) -> None:
        """See `Policy`."""
        for name, engine in zip(self._names, engines, strict=True):
            places = {str(adapter): "gpu" for adapter in engine.slots}
            report = EngineReport("ok", now, self._sizes.capacity, self._sizes.slots, engine.open, places)
            self._balancer.report(name, report, now)
