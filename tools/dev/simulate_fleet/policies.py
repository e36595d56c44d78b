"""The gateway's router, and policies to compare it with."""

import random

from ....runtime.gateway.router.load_balancer import EngineReport, LoadBalancer
from .engines import Arrival, Engine, Sizes


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
