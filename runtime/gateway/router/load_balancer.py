"""Which engine gets a request, and why. Pure bookkeeping: no socket, no loop, the clock is handed in.

A request for an adapter goes to an engine that holds it, on the GPU rather than in host memory, as long as that engine
is not much more loaded than the least loaded one; then the adapter spreads. An adapter that nobody holds goes where
there is least load and most room for it. Among engines that are about as good, one that has seen the prompt's beginning
is taken.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .engine_health import Standing
from .prefixes import Prefixes
from .ranking import Pool, Ranking

Reason = Literal[
    "adapter on gpu", "adapter in host memory", "prefix", "least loaded", "adapter new", "spread: hot", "all stalled"
]
_ALONE: dict[str | None, Reason] = {"gpu": "adapter on gpu", "cpu": "adapter in host memory", None: "adapter new"}
DRAWN = 24
"""Of more engines that hold an adapter so many are looked at."""


@dataclass(frozen=True)
class Rules:
    """When an adapter spreads, and what a known beginning is worth. Shares are parts of an engine's capacity.

    spread_ratio, spread_share   an engine that holds the adapter is taken while its load is at most so many times the
                                 least load, plus this share
    least_spread                 and so many requests in any case
    room_share                   what full adapter slots count as, where an adapter is to be loaded
    prefix_share, prefix_pages   an engine that has seen so many pages may have this share more load; fewer pages, less
    """

    spread_ratio: float = 1.25
    spread_share: float = 0.125
    least_spread: int = 4
    room_share: float = 0.25
    prefix_share: float = 0.0625
    prefix_pages: int = 32


@dataclass(frozen=True)
class Report:
    """What an engine said.

    status      `ok`, `loading`, `stalled`, `draining`, `dead`
    capacity    requests that run at once
    slots       adapters on the GPU at once
    open        requests that it has open, of everybody
    places      adapter -> `gpu` (or on its way there) or `cpu`; None: as before
    known       the adapters that it has; None: all that are asked for
    asked       when the question was sent; what happened later is not in it
    """

    status: str
    asked: float
    capacity: int = 1
    slots: int = 0
    open: int = 0
    places: Mapping[str, str] | None = None
    known: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine's name, and why it was chosen."""

    engine: str
    reason: Reason


@dataclass(eq=False, slots=True)
class _Engine:
    name: str
    number: int
    standing: Standing = field(default_factory=Standing)
    capacity: int = 1
    slots: int = 0
    own: int = 0  # requests that were begun here and not ended
    others: int = 0  # requests of other clients
    load: float = 0.0
    known: frozenset[str] | None = None
    held: dict[str, str] = field(default_factory=dict)  # adapter -> gpu, cpu
    on_gpu: dict[str, None] = field(default_factory=dict)  # least recently asked for first
    given: dict[str, float] = field(default_factory=dict)  # adapter -> when a request for it was last sent

    @property
    def fullness(self) -> float:
        """How much of its adapter slots is taken, 0..1."""
        return min(1.0, len(self.on_gpu) / self.slots) if self.slots else 1.0


class Book:
    """The engines, and what each is expected to hold. `source` draws among equals."""

    def __init__(self, rules: Rules | None = None, source: random.Random | None = None) -> None:
        self.rules = rules or Rules()
        self._source = source or random.Random()
        self._engines: dict[str, _Engine] = {}
        self._numbers = 0
        self._by_number: dict[int, _Engine] = {}
        self._by_load: Ranking[_Engine] = Ranking(self._source)
        self._by_room: Ranking[_Engine] = Ranking(self._source)
        self._resting: dict[_Engine, float] = {}
        self._stalled: set[_Engine] = set()
        self._holders: dict[tuple[str, str], Pool[_Engine]] = {}  # (adapter, gpu or cpu)
        self._prefixes = Prefixes()

    # -- engines ---------------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """A new engine, of which nothing is known yet. Raises ValueError for a name that is taken."""
        if name in self._engines:
            raise ValueError(f"engine {name!r} is in the book already")
        self._engines[name] = engine = _Engine(name, 0)
        self._new_number(engine)

    def remove(self, name: str) -> None:
        """An engine is gone for good."""
        engine = self._engines.pop(name)
        self._forget(engine)
        del self._by_number[engine.number]
        engine.standing.status = "lost"
        self._place(engine, 0.0)

    def report(self, name: str, report: Report, now: float) -> None:
        """An engine said how it is."""
        engine = self._engines[name]
        engine.standing.status = report.status
        engine.capacity, engine.slots = max(1, report.capacity), report.slots
        engine.others = max(0, report.open - engine.own)
        engine.known = report.known
        if report.places is not None:
            self._hold(engine, report.places, report.asked)
        self._place(engine, now)

    def says(self, name: str, status: str, now: float) -> None:
        """An engine refused a request: it is `loading` or `draining`."""
        engine = self._engines[name]
        engine.standing.status = status
        self._place(engine, now)

    def lost(self, name: str, now: float) -> None:
        """An engine died or cannot be reached: it holds nothing any more."""
        engine = self._engines[name]
        engine.standing.lost(now)
        engine.others = 0
        self._forget(engine)
        del self._by_number[engine.number]
        self._new_number(engine)
        self._place(engine, now)

    def status(self, name: str) -> str:
        """What an engine said last, or `lost`."""
        return self._engines[name].standing.status

    def load(self, name: str) -> float:
        """An engine's open requests, as a share of those that run at once."""
        return self._engines[name].load

    def holders(self, adapter: str, place: str = "gpu") -> list[str]:
        """The engines that are taken to hold an adapter on the GPU, or (`cpu`) in host memory."""
        pool = self._holders.get((adapter, place))
        return [] if pool is None else [engine.name for engine in pool.some(len(pool), self._source)]

    def next_rest_end(self) -> float | None:
        """When the next engine that rests after a loss may be used again."""
        return min(self._resting.values(), default=None)

    # -- requests --------------------------------------------------------------------------------------------------

    def begin(self, name: str, adapter: str | None, keys: Sequence[bytes], now: float) -> None:
        """A request is sent to an engine; `keys`: `prefixes.chain` of its prompt."""
        engine = self._engines[name]
        engine.own += 1
        if adapter is not None:
            engine.given[adapter] = now
            engine.on_gpu.pop(adapter, None)
            self._put(engine, adapter, "gpu")
            engine.on_gpu[adapter] = None
            while len(engine.on_gpu) > max(1, engine.slots):
                self._put(engine, next(iter(engine.on_gpu)), "cpu")
        self._prefixes.note(keys, engine.number)
        self._place(engine, now)

    def end(self, name: str, answered: bool, now: float) -> None:
        """That request is over there; `answered`: it came to its end."""
        engine = self._engines.get(name)
        if engine is None:
            return
        engine.own = max(0, engine.own - 1)
        if answered:
            engine.standing.answered()
        self._place(engine, now)

    def choose(
        self, adapter: str | None, keys: Sequence[bytes], now: float, excluded: Collection[str] = ()
    ) -> Choice | None:
        """The engine for a request; None while there is none. `excluded`: engines that have just refused it."""
        self._wake(now)

        def fits(engine: _Engine) -> bool:
            return engine.name not in excluded and (adapter is None or engine.known is None or adapter in engine.known)

        least = self._by_load.first(fits)
        if least is None:
            stalled = min(filter(fits, self._stalled), key=lambda engine: engine.load, default=None)
            return None if stalled is None else Choice(stalled.name, "all stalled")
        if adapter is None:
            return self._with_prefix(least, "least loaded", keys, fits)
        if len(self._engines) == 1:
            return Choice(least.name, _ALONE[least.held.get(adapter)])
        roomy = self._by_room.first(fits) or least
        bound = self._bound(least) + self.rules.room_share * roomy.fullness
        held = self._least_holder(adapter, "gpu", fits)
        if held is not None and held.load <= bound:
            on_gpu = self._holders[adapter, "gpu"]
            return self._with_prefix(held, "adapter on gpu", keys, lambda engine: engine in on_gpu and fits(engine))
        near = self._least_holder(adapter, "cpu", fits)
        if near is not None and near.load <= bound:
            return Choice(near.name, "adapter in host memory" if held is None else "spread: hot")
        return Choice(roomy.name, "adapter new" if held is None and near is None else "spread: hot")

    def _bound(self, least: _Engine) -> float:
        """The load up to which an engine that holds the adapter is preferred to a free slot on the least loaded."""
        rules = self.rules
        share = max(rules.spread_share, rules.least_spread / least.capacity)
        return least.load * rules.spread_ratio + share

    def _with_prefix(
        self, best: _Engine, reason: Reason, keys: Sequence[bytes], fits: Callable[[_Engine], bool]
    ) -> Choice:
        """`best`, or an engine about as good that has seen more of the prompt's beginning."""
        rules = self.rules
        for pages, numbers in self._prefixes.engines(keys):
            limit = best.load + rules.prefix_share * min(1.0, pages / rules.prefix_pages)
            seen = [self._by_number[number] for number in numbers if number in self._by_number]
            seen = [engine for engine in seen if engine in self._by_load and engine.load <= limit and fits(engine)]
            if seen:
                return Choice(min(seen, key=lambda engine: engine.load).name, "prefix")
        return Choice(best.name, reason)

    def _least_holder(self, adapter: str, place: str, fits: Callable[[_Engine], bool]) -> _Engine | None:
        pool = self._holders.get((adapter, place))
        if pool is None:
            return None
        best: _Engine | None = None
        for engine in pool.some(DRAWN, self._source):
            if (best is None or engine.load < best.load) and engine in self._by_load and fits(engine):
                best = engine
        return best

    # -- what is held ----------------------------------------------------------------------------------------------

    def _hold(self, engine: _Engine, places: Mapping[str, str], asked: float) -> None:
        """Take a report in, except for adapters that requests were sent for since it was asked for."""
        engine.given = {adapter: when for adapter, when in engine.given.items() if when >= asked}
        for adapter in [adapter for adapter in engine.held if adapter not in places and adapter not in engine.given]:
            self._put(engine, adapter, "")
        for adapter, place in places.items():
            if adapter not in engine.given:
                self._put(engine, adapter, place)

    def _put(self, engine: _Engine, adapter: str, place: str) -> None:
        """An adapter is on an engine's `gpu`, in its host memory (`cpu`), or neither ("")."""
        former = engine.held.get(adapter, "")
        if former == place:
            return
        if former:
            pool = self._holders[adapter, former]
            pool.discard(engine)
            if not pool:
                del self._holders[adapter, former]
            del engine.held[adapter]
        if place:
            engine.held[adapter] = place
            self._holders.setdefault((adapter, place), Pool()).add(engine)
        if place == "gpu":
            engine.on_gpu[adapter] = None
        else:
            engine.on_gpu.pop(adapter, None)

    def _forget(self, engine: _Engine) -> None:
        engine.given.clear()
        for adapter in list(engine.held):
            self._put(engine, adapter, "")

    # -- who is used -----------------------------------------------------------------------------------------------

    def _new_number(self, engine: _Engine) -> None:
        """Beginnings that it saw under its former number are not there any more."""
        self._numbers += 1
        engine.number = self._numbers
        self._by_number[engine.number] = engine

    def _place(self, engine: _Engine, now: float) -> None:
        """Put an engine where its standing and its load belong."""
        engine.load = (engine.own + engine.others) / engine.capacity
        standing = engine.standing
        self._resting.pop(engine, None)
        self._stalled.discard(engine)
        if standing.usable(now):
            self._by_load.put(engine, engine.load)
            self._by_room.put(engine, engine.load + self.rules.room_share * engine.fullness)
            return
        self._by_load.drop(engine)
        self._by_room.drop(engine)
        if standing.status == "ok":
            self._resting[engine] = standing.rests_until
        elif standing.status == "stalled":
            self._stalled.add(engine)

    def _wake(self, now: float) -> None:
        if not self._resting:
            return
        for engine in [engine for engine, until in self._resting.items() if now >= until]:
            self._place(engine, now)
