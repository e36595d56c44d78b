"""The engines' own counters and gauges as Prometheus metrics, as they were when /metrics was asked for."""

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...api.errors import RequestError, ServerError
from ..contracts import AdapterCard, Engines, GatewayError, HealthStatus, ModelInfo

SECONDS = 2.0
MAX_NAMES = 512
PLACES = ("gpu", "cpu", "disk", "loading")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")


@dataclass(frozen=True)
class Snapshot:
    """What the engines said: numbers and health by engine, adapters, the model (None: nobody said)."""

    stats: Mapping[str, Mapping[str, int | float]] = field(default_factory=dict)
    health: Mapping[str, HealthStatus] = field(default_factory=dict)
    adapters: tuple[AdapterCard, ...] = ()
    model: ModelInfo | None = None


async def look(engines: Engines) -> Snapshot:
    """Ask them; what does not come within two seconds, or fails, is left out."""
    stats: Mapping[str, Mapping[str, int | float]] = {}
    adapters: tuple[AdapterCard, ...] = ()
    model: ModelInfo | None = None
    health: Mapping[str, HealthStatus] = {}
    failures = (ServerError, RequestError, GatewayError, TimeoutError)
    with contextlib.suppress(*failures):
        async with asyncio.timeout(SECONDS):
            together = await engines.health()
            health = together.engines
            if together.status == "idle":  # asking for the model would start an engine
                return Snapshot()
            model = await engines.model()
            stats = await engines.stats()
            adapters = tuple(await engines.adapters())
    return Snapshot(stats, health, adapters, model)


def families(seen: Snapshot) -> Iterator[Metric]:
    """`sidestream_engine_*`, with the engine's name as a label; names that are no metric's are left out."""
    up = GaugeMetricFamily("sidestream_engine_up", "Whether the engine takes requests.", labels=["engine"])
    for engine, status in seen.health.items():
        up.add_metric([engine], float(status in ("ok", "stalled")))
    yield up
    where = GaugeMetricFamily("sidestream_engine_adapters_at", "Adapters by place.", labels=["engine", "place"])
    for engine in sorted({engine for card in seen.adapters for engine in card.places}):
        for place in PLACES:
            where.add_metric([engine, place], sum(card.places.get(engine) == place for card in seen.adapters))
    yield where
    names = sorted({name for values in seen.stats.values() for name in values if _NAME.match(name)})[:MAX_NAMES]
    for name in names:
        counts = name.endswith("_total")
        metric = f"sidestream_engine_{name.removesuffix('_total')}"
        words = name.replace("_", " ")
        kind = CounterMetricFamily if counts else GaugeMetricFamily
        family = kind(metric, f"The engine's {words.removesuffix(' total')}.", labels=["engine"])
        for engine, values in seen.stats.items():
            if name in values:
                family.add_metric([engine], float(values[name]))
        yield family
