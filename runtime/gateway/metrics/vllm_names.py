"""The same numbers under vLLM's names and labels, for dashboards and routers that were made for it.

A gauge has a series for each engine. Latencies and token counts are the gateway's own, over all engines; their label
`engine` is "0".
"""

import time
from collections.abc import Iterator, Mapping

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..contracts import ModelInfo
from .engine_numbers import Snapshot

_LABELS = ["model_name", "engine"]
# vLLM's name -> the engine's, and what it says
_GAUGES = {
    "num_requests_running": ("requests_running", "Requests in execution."),
    "num_requests_waiting": ("requests_waiting", "Requests that wait."),
}
_COUNTERS = {
    "num_preemptions": ("preemptions_total", "Preemptions."),
    "prefix_cache_queries": ("prefix_queries_total", "Prompt tokens that were looked up in the prefix cache."),
    "spec_decode_num_draft_tokens": ("draft_tokens_total", "Drafts of tokens that were computed."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens_total", "Drafts that became output."),
    "prefix_cache_hits": ("prefix_hits_total", "Prompt tokens that were found in the prefix cache."),
}


def families(
    seen: Snapshot, histograms: Mapping[str, Collector], counters: Mapping[str, Counter], reasons: Counter
) -> Iterator[Metric]:
    """`vllm:*`; nothing while no engine has said which model it serves.

    `histograms`, `counters`: by vLLM's name without its prefix; `reasons`: completions by `reason`.
    """
    if seen.model is None:
        return
    model = seen.model.name
    for name, (ours, words) in _GAUGES.items():
        yield _by_engine(GaugeMetricFamily(f"vllm:{name}", words, labels=_LABELS), seen, model, ours)
    for name, (ours, words) in _COUNTERS.items():
        yield _by_engine(CounterMetricFamily(f"vllm:{name}", words, labels=_LABELS), seen, model, ours)
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Part of the KV cache in use; 1 is all of it.", labels=_LABELS
    )
    for place, values in enumerate(seen.stats.values()):
        if values.get("pages"):
            usage.add_metric([model, str(place)], values.get("pages_in_use", 0) / values["pages"])
    yield usage
    for name, histogram in histograms.items():
        yield _renamed(f"vllm:{name}", histogram, {"model_name": model, "engine": "0"})
    for name, counter in counters.items():
        total = CounterMetricFamily(f"vllm:{name}", _words(counter), labels=_LABELS)
        total.add_metric([model, "0"], sum(_values(counter).values()))
        yield total
    success = CounterMetricFamily(
        "vllm:request_success", "Completions that ended, by reason.", labels=[*_LABELS, "finished_reason"]
    )
    for reason, value in _values(reasons).items():
        success.add_metric([model, "0", reason], value)
    yield success
    yield _adapters(seen, seen.model)


def _adapters(seen: Snapshot, model: ModelInfo) -> Metric:
    """The newest sample tells the adapters of running and waiting requests; its value is the time."""
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and waiting requests.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    running, waiting = (
        ",".join(card.name for card in seen.adapters if getattr(card, which)) for which in ("running", "waiting")
    )
    family.add_metric([str(model.max_adapters), running, waiting], time.time())
    return family


def _by_engine(
    family: GaugeMetricFamily | CounterMetricFamily, seen: Snapshot, model: str, name: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for place, values in enumerate(seen.stats.values()):
        if name in values:
            family.add_metric([model, str(place)], float(values[name]))
    return family


def _renamed(name: str, histogram: Collector, labels: dict[str, str]) -> Metric:
    (found,) = histogram.collect()
    family = Metric(name, found.documentation, found.type)
    for sample in found.samples:
        if not sample.name.endswith("_created"):
            family.add_sample(sample.name.replace(found.name, name, 1), sample.labels | labels, sample.value)
    return family


def _values(counter: Counter) -> dict[str, float]:
    (found,) = counter.collect()
    return {
        next(iter(sample.labels.values())): sample.value for sample in found.samples if sample.name.endswith("_total")
    }


def _words(counter: Counter) -> str:
    (found,) = counter.collect()
    return found.documentation
