"""Decides which engine gets a request. Pure bookkeeping: no sockets, no event loop, and callers pass the clock.

A request goes to an engine that holds its adapter, preferably on the GPU, unless that engine is much more loaded than
the least loaded one; then another engine loads the adapter too. If no engine holds the adapter, the request goes to an
engine with low load and free adapter slots. Among engines that are about equally good, one that has seen the prompt's
prefix is chosen.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...api.adapter_sum import is_sum, sum_parts
from .least_loaded import LoadHeap, RandomPool
from .prefix_index import PrefixIndex

Reason = Literal[
    "adapter on gpu", "adapter in host memory", "prefix", "least loaded", "adapter new", "spread: hot", "all stalled"
]
_SINGLE_ENGINE_REASONS: dict[str | None, Reason] = {
    "gpu": "adapter on gpu",
    "cpu": "adapter in host memory",
    None: "adapter new",
}
MAX_CANDIDATES = 24
"""Holders of an adapter that are compared; more are sampled."""
FIRST_BACKOFF = 0.25
MAX_BACKOFF = 30.0


@dataclass(slots=True)
class EngineHealth:
    """Health of one engine. Times are seconds of the caller's clock.

    status          last reported status, or `lost` while it cannot be reached
    failures        connection losses since it last finished a request
    backoff_until   it gets no requests before this time
    """

    status: str = "lost"
    failures: int = 0
    backoff_until: float = 0.0

    def mark_lost(self, now: float) -> None:
        """Record a lost connection, and back off exponentially."""
        if self.status in ("ok", "stalled"):
            self.failures += 1
            self.backoff_until = now + min(MAX_BACKOFF, FIRST_BACKOFF * 2.0 ** min(self.failures - 1, 16))
        self.status = "lost"

    def reset_failures(self) -> None:
        """Record a finished request: earlier losses were temporary."""
        self.failures, self.backoff_until = 0, 0.0

    def is_usable(self, now: float) -> bool:
        """Return whether it may receive requests."""
        return self.status == "ok" and now >= self.backoff_until


@dataclass(frozen=True)
class Rules:
    """Thresholds of the decision. Shares are fractions of an engine's capacity.

    spread_ratio, spread_share   an engine that holds the adapter is chosen up to this multiple of the least load, plus
                                 this share
    least_spread                 minimum of spread_share, in requests
    room_share                   load that full adapter slots count as, when an adapter must be loaded
    prefix_share, prefix_pages   additional load that a known prefix of prefix_pages or more is worth; shorter prefixes
                                 are worth proportionally less
    """

    spread_ratio: float = 1.25
    spread_share: float = 0.125
    least_spread: int = 4
    room_share: float = 0.25
    prefix_share: float = 0.0625
    prefix_pages: int = 32


@dataclass(frozen=True)
class EngineReport:
    """State that an engine reported.

    status      `ok`, `loading`, `stalled`, `draining`, `dead`
    queried_at       time of the query; later events are not included
    capacity    requests that run at once
    slots       adapters on the GPU at once
    open        open requests of all clients
    places      adapter -> `gpu` (or on its way there) or `cpu`; None: unchanged
    known       adapters that requests may name; None: all
    """

    status: str
    queried_at: float
    capacity: int = 1
    slots: int = 0
    open: int = 0
    places: Mapping[str, str] | None = None
    known: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """Name of the chosen engine, and the reason."""

    engine: str
    reason: Reason


@dataclass(eq=False, slots=True)
class _Engine:
    name: str
    number: int  # in the prefix index
    is_prefill: bool = False  # it only computes prompts
    health: EngineHealth = field(default_factory=EngineHealth)
    capacity: int = 1
    slots: int = 0
    own_requests: float = 0.0  # open requests of this router, by weight
    other_requests: int = 0  # open requests of other clients
    load: float = 0.0
    known: frozenset[str] | None = None
    places: dict[str, str] = field(default_factory=dict)  # adapter -> gpu, cpu
    gpu_lru: dict[str, None] = field(default_factory=dict)  # adapters on the GPU, least recently used first
    last_sent: dict[str, float] = field(default_factory=dict)  # adapter -> time of the last request for it

    @property
    def slot_usage(self) -> float:
        """Fraction of adapter slots in use, 0..1."""
        return min(1.0, len(self.gpu_lru) / self.slots) if self.slots else 1.0


class LoadBalancer:
    """The engines and their expected state. `source` breaks ties."""

    def __init__(self, rules: Rules | None = None, source: random.Random | None = None) -> None:
        self.rules = rules or Rules()
        self._source = source or random.Random()
        self._engines: dict[str, _Engine] = {}
        self._last_number = 0
        self._by_number: dict[int, _Engine] = {}
        self._by_load: LoadHeap[_Engine] = LoadHeap(self._source)
        self._by_room: LoadHeap[_Engine] = LoadHeap(self._source)
        self._backing_off: dict[_Engine, float] = {}
        self._stalled: set[_Engine] = set()
        self._holders: dict[tuple[str, str], RandomPool[_Engine]] = {}  # (adapter, gpu or cpu)
        self._prefixes = PrefixIndex()

    # -- engines ---------------------------------------------------------------------------------------------------

    def add(self, name: str, is_prefill: bool = False) -> None:
        """Add an engine without known state. Raises ValueError if the name is taken. `is_prefill`: it only computes
        prompts.
        """
        if name in self._engines:
            raise ValueError(f"engine {name!r} exists already")
        self._engines[name] = engine = _Engine(name, 0, is_prefill)
        self._assign_number(engine)

    def remove(self, name: str) -> None:
        """Remove an engine."""
        engine = self._engines.pop(name)
        self._clear_adapters(engine)
        del self._by_number[engine.number]
        engine.health.status = "lost"
        self._update_rankings(engine, 0.0)

    def report(self, name: str, report: EngineReport, now: float) -> None:
        """Apply a report of an engine."""
        engine = self._engines[name]
        engine.health.status = report.status
        engine.capacity, engine.slots = max(1, report.capacity), report.slots
        engine.other_requests = max(0, report.open - math.ceil(engine.own_requests))
        engine.known = report.known
        if report.places is not None:
            self._apply_places(engine, report.places, report.queried_at)
        self._update_rankings(engine, now)

    def set_status(self, name: str, status: str, now: float) -> None:
        """Set the status of an engine that refused a request: `loading` or `draining`."""
        engine = self._engines[name]
        engine.health.status = status
        self._update_rankings(engine, now)

    def mark_lost(self, name: str, now: float) -> None:
        """Record that an engine died or cannot be reached, and forget its adapters and prefixes."""
        engine = self._engines[name]
        engine.health.mark_lost(now)
        engine.other_requests = 0
        self._clear_adapters(engine)
        del self._by_number[engine.number]
        self._assign_number(engine)
        self._update_rankings(engine, now)

    def status(self, name: str) -> str:
        """Return an engine's last status, or `lost`."""
        return self._engines[name].health.status

    def load(self, name: str) -> float:
        """Return an engine's open requests as a fraction of its capacity."""
        return self._engines[name].load

    def holders(self, adapter: str, place: str = "gpu") -> list[str]:
        """Return the engines that are expected to hold an adapter on the GPU or (`cpu`) in host memory."""
        pool = self._holders.get((adapter, place))
        return [] if pool is None else [engine.name for engine in pool.some(len(pool), self._source)]

    def next_backoff_end(self) -> float | None:
        """Return the time at which the next backoff ends."""
        return min(self._backing_off.values(), default=None)

    # -- requests --------------------------------------------------------------------------------------------------

    def start_request(
        self, name: str, adapter: str | None, keys: Sequence[bytes], now: float, weight: float = 1.0
    ) -> None:
        """Record that a request is sent to an engine. `keys`: `prefix_keys` of its prompt; `weight`: number of usual
        requests that it counts as.
        """
        engine = self._engines[name]
        engine.own_requests += weight
        if adapter is not None:
            engine.last_sent[adapter] = now
            engine.gpu_lru.pop(adapter, None)
            self._set_place(engine, adapter, "gpu")
            engine.gpu_lru[adapter] = None
            while len(engine.gpu_lru) > max(1, engine.slots):
                self._set_place(engine, next(iter(engine.gpu_lru)), "cpu")
        self._prefixes.add(keys, engine.number)
        self._update_rankings(engine, now)

    def finish_request(self, name: str, completed: bool, now: float, weight: float = 1.0) -> None:
        """Record that a request left an engine. `completed`: its answer is complete; `weight`: as at its start."""
        engine = self._engines.get(name)
        if engine is None:
            return
        engine.own_requests = max(0.0, engine.own_requests - weight)
        if completed:
            engine.health.reset_failures()
        self._update_rankings(engine, now)

    def choose(
        self,
        adapter: str | None,
        keys: Sequence[bytes],
        now: float,
        excluded: Collection[str] = (),
        shares_base: bool = False,
        prefill: bool = False,
    ) -> RoutingDecision | None:
        """Return the engine for a request; None if there is none. `excluded`: engines that just refused it. `prefill`:
        choose one that only computes prompts, otherwise none of these.

        `shares_base`: `keys` are those of the base model, as for aLoRA. A known prefix of `prefix_pages` is then worth
        more than the adapter's place, because computing it takes longer than loading the adapter.
        """
        self._end_backoffs(now)
        parts = () if adapter is None else [part for part, _ in sum_parts(adapter)]

        def fits(engine: _Engine) -> bool:
            if engine.name in excluded or engine.is_prefill != prefill:
                return False
            return engine.known is None or all(part in engine.known for part in parts)

        least = self._by_load.first(fits)
        if least is None:
            stalled = min(filter(fits, self._stalled), key=lambda engine: engine.load, default=None)
            return None if stalled is None else RoutingDecision(stalled.name, "all stalled")
        if adapter is None:
            return self._prefer_prefix(least, "least loaded", keys, fits)
        if len(self._engines) == 1:
            return RoutingDecision(least.name, _SINGLE_ENGINE_REASONS[least.places.get(adapter)])
        if shares_base and (decision := self._by_prefix(least, keys, fits, self.rules.prefix_pages)) is not None:
            return decision
        roomy = self._by_room.first(fits) or least
        bound = self._load_bound(least) + self.rules.room_share * roomy.slot_usage
        gpu_holder = self._least_loaded_holder(adapter, "gpu", fits)
        if gpu_holder is not None and gpu_holder.load <= bound:
            on_gpu = self._holders[adapter, "gpu"]
            return self._prefer_prefix(
                gpu_holder, "adapter on gpu", keys, lambda engine: engine in on_gpu and fits(engine)
            )
        cpu_holder = self._least_loaded_holder(adapter, "cpu", fits)
        if cpu_holder is not None and cpu_holder.load <= bound:
            return RoutingDecision(cpu_holder.name, "adapter in host memory" if gpu_holder is None else "spread: hot")
        is_new = gpu_holder is None and cpu_holder is None
        return RoutingDecision(roomy.name, "adapter new" if is_new else "spread: hot")

    def cached_pages(self, keys: Sequence[bytes]) -> int:
        """Return how many of the prompt's first pages an engine has seen that computes answers."""
        for pages, numbers in self._prefixes.engines(keys):
            engines = [self._by_number[number] for number in numbers if number in self._by_number]
            if not all(engine.is_prefill for engine in engines):
                return pages
        return 0

    def _load_bound(self, least: _Engine) -> float:
        """Return the load up to which a holder of the adapter is preferred to the least loaded engine."""
        rules = self.rules
        share = max(rules.spread_share, rules.least_spread / least.capacity)
        return least.load * rules.spread_ratio + share

    def _prefer_prefix(
        self, best: _Engine, reason: Reason, keys: Sequence[bytes], fits: Callable[[_Engine], bool]
    ) -> RoutingDecision:
        """Choose `best`, or an engine with similar load that has seen a longer prefix of the prompt."""
        return self._by_prefix(best, keys, fits) or RoutingDecision(best.name, reason)

    def _by_prefix(
        self, best: _Engine, keys: Sequence[bytes], fits: Callable[[_Engine], bool], least_pages: int = 1
    ) -> RoutingDecision | None:
        """Choose an engine with similar load as `best` that has seen `least_pages` or more of the prompt, or None."""
        rules = self.rules
        for pages, numbers in self._prefixes.engines(keys):
            if pages < least_pages:
                break
            limit = best.load + rules.prefix_share * min(1.0, pages / rules.prefix_pages)
            engines = [self._by_number[number] for number in numbers if number in self._by_number]
            engines = [each for each in engines if each in self._by_load and each.load <= limit and fits(each)]
            if engines:
                return RoutingDecision(min(engines, key=lambda engine: engine.load).name, "prefix")
        return None

    def _least_loaded_holder(self, adapter: str, place: str, fits: Callable[[_Engine], bool]) -> _Engine | None:
        pool = self._holders.get((adapter, place))
        if pool is None:
            return None
        best: _Engine | None = None
        for engine in pool.some(MAX_CANDIDATES, self._source):
            if (best is None or engine.load < best.load) and engine in self._by_load and fits(engine):
                best = engine
        return best

    # -- adapters --------------------------------------------------------------------------------------------------

    def _apply_places(self, engine: _Engine, places: Mapping[str, str], queried_at: float) -> None:
        """Apply reported places, except of adapters with requests sent since the query."""
        engine.last_sent = {adapter: sent for adapter, sent in engine.last_sent.items() if sent >= queried_at}
        # engines do not report sums; those that are expected on the GPU stay, and there are few
        kept = {name for name in engine.gpu_lru if is_sum(name)}
        gone = [name for name in engine.places if not (name in places or name in engine.last_sent or name in kept)]
        for adapter in gone:
            self._set_place(engine, adapter, "")
        for adapter, place in places.items():
            if adapter not in engine.last_sent:
                self._set_place(engine, adapter, place)

    def _set_place(self, engine: _Engine, adapter: str, place: str) -> None:
        """Set an adapter's place on an engine: `gpu`, `cpu`, or "" for neither."""
        former = engine.places.get(adapter, "")
        if former == place:
            return
        if former:
            pool = self._holders[adapter, former]
            pool.discard(engine)
            if not pool:
                del self._holders[adapter, former]
            del engine.places[adapter]
        if place:
            engine.places[adapter] = place
            self._holders.setdefault((adapter, place), RandomPool()).add(engine)
        if place == "gpu":
            engine.gpu_lru[adapter] = None
        else:
            engine.gpu_lru.pop(adapter, None)

    def _clear_adapters(self, engine: _Engine) -> None:
        engine.last_sent.clear()
        for adapter in list(engine.places):
            self._set_place(engine, adapter, "")

    # -- rankings --------------------------------------------------------------------------------------------------

    def _assign_number(self, engine: _Engine) -> None:
        """Assign a new number, which invalidates the engine's entries in the prefix index."""
        self._last_number += 1
        engine.number = self._last_number
        self._by_number[engine.number] = engine

    def _update_rankings(self, engine: _Engine, now: float) -> None:
        """Update the load of an engine, and its membership in heaps and sets."""
        engine.load = (engine.own_requests + engine.other_requests) / engine.capacity
        health = engine.health
        self._backing_off.pop(engine, None)
        self._stalled.discard(engine)
        if health.is_usable(now):
            self._by_load.put(engine, engine.load)
            self._by_room.put(engine, engine.load + self.rules.room_share * engine.slot_usage)
            return
        self._by_load.discard(engine)
        self._by_room.discard(engine)
        if health.status == "ok":
            self._backing_off[engine] = health.backoff_until
        elif health.status == "stalled":
            self._stalled.add(engine)

    def _end_backoffs(self, now: float) -> None:
        if not self._backing_off:
            return
        for engine in [engine for engine, until in self._backing_off.items() if now >= until]:
            self._update_rankings(engine, now)
