"""Counters and gauges of the engines as Prometheus metrics, and the same metrics under vLLM's names and labels.

A gauge has one series per engine. Under vLLM's names, latencies and token counts are the gateway's own, over all
engines, with the label engine="0".
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...api.errors import RequestError, ServerError
from ..interfaces import AdapterCard, Engines, GatewayError, HealthStatus, ModelInfo

SECONDS = 2.0
MAX_NAMES = 512
PLACES = ("gpu", "cpu", "disk", "loading")
_STEPS_UP_TO = re.compile(r"steps_up_to_(\d+)_tokens_total\Z")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")


@dataclass(frozen=True)
class EngineSnapshot:
    """State of the engines: stats and health by engine, adapters, and the model (None: unknown)."""

    stats: Mapping[str, Mapping[str, int | float]] = field(default_factory=dict)
    health: Mapping[str, HealthStatus] = field(default_factory=dict)
    adapters: tuple[AdapterCard, ...] = ()
    model: ModelInfo | None = None


async def take_snapshot(engines: Engines) -> EngineSnapshot:
    """Query the engines. Queries that fail or take longer than SECONDS are omitted."""
    stats: Mapping[str, Mapping[str, int | float]] = {}
    adapters: tuple[AdapterCard, ...] = ()
    model: ModelInfo | None = None
    health: Mapping[str, HealthStatus] = {}
    failures = (ServerError, RequestError, GatewayError, TimeoutError)
    with contextlib.suppress(*failures):
        async with asyncio.timeout(SECONDS):
            combined = await engines.health()
            health = combined.engines
            if combined.status == "idle":  # a query for the model would start an engine
                return EngineSnapshot()
            model = await engines.model()
            stats = await engines.stats()
            adapters = tuple(await engines.adapters())
    return EngineSnapshot(stats, health, adapters, model)


def engine_families(snapshot: EngineSnapshot) -> Iterator[Metric]:
    """Yield `sidestream_engine_*` with the engine's name as a label, without invalid metric names."""
    up = GaugeMetricFamily("sidestream_engine_up", "Whether the engine takes requests.", labels=["engine"])
    for engine, status in snapshot.health.items():
        up.add_metric([engine], float(status in ("ok", "stalled")))
    yield up
    where = GaugeMetricFamily("sidestream_engine_adapters_at", "Adapters by place.", labels=["engine", "place"])
    for engine in sorted({engine for card in snapshot.adapters for engine in card.places}):
        for place in PLACES:
            where.add_metric([engine, place], sum(card.places.get(engine) == place for card in snapshot.adapters))
    yield where
    names = sorted({name for values in snapshot.stats.values() for name in values if _NAME.match(name)})[:MAX_NAMES]
    for name in names:
        counts = name.endswith("_total")
        metric = f"sidestream_engine_{name.removesuffix('_total')}"
        help_text = name.replace("_", " ")
        kind = CounterMetricFamily if counts else GaugeMetricFamily
        family = kind(metric, f"The engine's {help_text.removesuffix(' total')}.", labels=["engine"])
        for engine, values in snapshot.stats.items():
            if name in values:
                family.add_metric([engine], float(values[name]))
        yield family


_LABELS = ["model_name", "engine"]
# vLLM's name -> the engine's name, help text
_GAUGES = {
    "num_requests_running": ("requests_running", "Requests in execution."),
    "num_requests_waiting": ("requests_waiting", "Requests in the queue."),
}
_COUNTERS = {
    "spec_decode_num_drafts": ("drafts_total", "Steps of a sequence with drafts."),
    "num_preemptions": ("preemptions_total", "Preemptions."),
    "admission_rejections": ("overloaded_total", "Requests refused because too many wait."),
    "prefix_cache_queries": ("prefix_queries_total", "Prompt tokens that were looked up in the prefix cache."),
    "spec_decode_num_draft_tokens": ("draft_tokens_total", "Draft tokens that were computed."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens_total", "Draft tokens that became output."),
    "prefix_cache_hits": ("prefix_hits_total", "Prompt tokens that were found in the prefix cache."),
}


def vllm_families(
    snapshot: EngineSnapshot, histograms: Mapping[str, Collector], counters: Mapping[str, Counter], reasons: Counter
) -> Iterator[Metric]:
    """Yield `vllm:*`; nothing while the model is unknown.

    histograms, counters   by vLLM's name without its prefix
    reasons                counter of completions by `reason`
    """
    if snapshot.model is None:
        return
    model = snapshot.model.name
    for name, (ours, help_text) in _GAUGES.items():
        yield _by_engine(GaugeMetricFamily(f"vllm:{name}", help_text, labels=_LABELS), snapshot, model, ours)
    yield _waiting_by_reason(snapshot, model)
    for name, (ours, help_text) in _COUNTERS.items():
        yield _by_engine(CounterMetricFamily(f"vllm:{name}", help_text, labels=_LABELS), snapshot, model, ours)
    for former in ("hits", "queries"):  # their names until vLLM 0.9
        ours, help_text = _COUNTERS[f"prefix_cache_{former}"]
        family = CounterMetricFamily(f"vllm:gpu_prefix_cache_{former}", help_text, labels=_LABELS)
        yield _by_engine(family, snapshot, model, ours)
    for name in ("kv", "gpu"):
        help_text = "Part of the KV cache in use; 1 is all of it."
        usage = GaugeMetricFamily(f"vllm:{name}_cache_usage_perc", help_text, labels=_LABELS)
        for index, values in enumerate(snapshot.stats.values()):
            if values.get("pages"):
                usage.add_metric([model, str(index)], values.get("pages_in_use", 0) / values["pages"])
        yield usage
    yield _cache_config(snapshot, snapshot.model)
    yield _step_tokens(snapshot, model)
    for name, histogram in histograms.items():
        yield _renamed(f"vllm:{name}", histogram, {"model_name": model, "engine": "0"})
    for name, counter in counters.items():
        total = CounterMetricFamily(f"vllm:{name}", _help_of(counter), labels=_LABELS)
        total.add_metric([model, "0"], sum(_values(counter).values()))
        yield total
    success = CounterMetricFamily(
        "vllm:request_success", "Completions that ended, by reason.", labels=[*_LABELS, "finished_reason"]
    )
    for reason, value in _values(reasons).items():
        success.add_metric([model, "0", reason], value)
    yield success
    yield _adapters(snapshot, snapshot.model)


def _waiting_by_reason(snapshot: EngineSnapshot, model: str) -> Metric:
    """Return the waiting requests: `deferred` ones until their adapter is on the device, others until there is room."""
    help_text = "Requests in the queue, by reason."
    family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", help_text, labels=[*_LABELS, "reason"])
    for index, values in enumerate(snapshot.stats.values()):
        deferred = values.get("requests_waiting_for_adapters", 0)
        family.add_metric([model, str(index), "deferred"], deferred)
        family.add_metric([model, str(index), "capacity"], max(0, values.get("requests_waiting", 0) - deferred))
    return family


def _adapters(snapshot: EngineSnapshot, model: ModelInfo) -> Metric:
    """Return the adapters of running and waiting requests as labels. The value is the time."""
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and waiting requests.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    running, waiting = (
        ",".join(card.name for card in snapshot.adapters if getattr(card, which)) for which in ("running", "waiting")
    )
    family.add_metric([str(model.max_adapters), running, waiting], time.time())
    return family


def _cache_config(snapshot: EngineSnapshot, model: ModelInfo) -> Metric:
    """Return the sizes of the engines' KV caches as labels; concurrency is that of requests of maximum length. The
    value is 1.
    """
    own = ["block_size", "num_gpu_blocks", "enable_prefix_caching", "kv_cache_size_tokens", "kv_cache_max_concurrency"]
    family = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV cache.", labels=[*_LABELS, *own])
    for index, values in enumerate(snapshot.stats.values()):
        sizes = [int(values.get(name, 0)) for name in ("page_tokens", "pages")]
        tokens = math.prod(sizes)
        labels = [*sizes, bool(values.get("prefix_caching")), tokens, round(tokens / model.max_model_len, 2)]
        family.add_metric([model.name, str(index), *map(str, labels)], 1.0)
    return family


def _step_tokens(snapshot: EngineSnapshot, model: str) -> Metric:
    """Return the histogram of the tokens of steps."""
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=_LABELS)
    for index, values in enumerate(snapshot.stats.values()):
        counts = {
            float(match[1]): float(value) for name, value in values.items() if (match := _STEPS_UP_TO.match(name))
        }
        buckets = [(floatToGoString(bound), counts[bound]) for bound in sorted(counts)]
        buckets.append(("+Inf", float(values.get("planned_steps_total", 0))))
        family.add_metric([model, str(index)], buckets, float(values.get("planned_tokens_total", 0)))
    return family


def _by_engine(
    family: GaugeMetricFamily | CounterMetricFamily, snapshot: EngineSnapshot, model: str, name: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for index, values in enumerate(snapshot.stats.values()):
        if name in values:
            family.add_metric([model, str(index)], float(values[name]))
    return family


def _renamed(name: str, histogram: Collector, labels: dict[str, str]) -> Metric:
    (own,) = histogram.collect()
    family = Metric(name, own.documentation, own.type)
    for sample in own.samples:
        if not sample.name.endswith("_created"):
            family.add_sample(sample.name.replace(own.name, name, 1), sample.labels | labels, sample.value)
    return family


def _values(counter: Counter) -> dict[str, float]:
    (family,) = counter.collect()
    return {
        next(iter(sample.labels.values())): sample.value for sample in family.samples if sample.name.endswith("_total")
    }


def _help_of(counter: Counter) -> str:
    (family,) = counter.collect()
    return family.documentation
