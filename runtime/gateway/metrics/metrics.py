"""Prometheus metrics of the gateway.

Clients cannot choose label values. An adapter's name becomes a label only after an engine has served it, and all other
values are from the routes, the keys file or the engines.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ...api.adapter_sum import part_names
from ...protocol.messages import Chunk
from ..interfaces import AdmittedRequest, Engines, HistoryReport, HttpExchange, UsageRecord
from . import engine_metrics
from .history import History
from .observers import BaseObserver

OTHER = "other"
MAX_MODELS = 512
MAX_OWNERS = 1024
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"})
# the buckets of vLLM, for the same resolution of quantiles
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
TOKEN_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
COMPLETIONS = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)
_PHASES = {
    "queue": ("Time in an engine's queue.", FIRST_TOKEN_SECONDS),
    "prefill": ("Time from a request's first step to its first token.", FIRST_TOKEN_SECONDS),
    "decode": ("Time from a request's first token to its last.", REQUEST_SECONDS),
    "inference": ("Time from a request's first step to its end.", REQUEST_SECONDS),
}
_MODEL_COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that were found in the prefix cache.",
    "output_tokens": "Tokens of answers.",
    "draft_tokens": "Draft tokens that were computed.",
    "accepted_tokens": "Draft tokens that became tokens of answers.",
    "history_draft_tokens": "Draft tokens from earlier answers.",
    "history_accepted_tokens": "Accepted draft tokens from earlier answers.",
    "trained_draft_tokens": "Draft tokens of a trained draft model.",
    "trained_accepted_tokens": "Accepted draft tokens of a trained draft model.",
}
"""Field of UsageRecord, which is also the metric's name -> help text."""

Values = Callable[[], Mapping[str, int | float]]


class LabelLimit:
    """Limits the number of label values, since each creates a series that exists until the process ends.

    The first `limit` different values are returned as they are, all others as "other".
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        """Return the label for a value."""
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value


class CounterSeries:
    """Caches a counter's series by label values, because `Counter.labels` takes longer than counting."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self._series: dict[tuple[str, ...], Counter] = {}

    def __call__(self, *values: str) -> Counter:
        """Return the series with these label values."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self.counter.labels(*values)
        return series


class FastHistogram(Collector):
    """A histogram for thousands of observations per second by one thread.

    prometheus-client's own takes two locks per value and scans the buckets one by one. Registers itself.

    buckets   upper bounds, ascending, without infinity
    """

    def __init__(self, name: str, help_text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._help, self._bounds = name, help_text, list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum)
        return [family]


class Metrics(BaseObserver):
    """An `Observer` that counts and renders /metrics.

    vllm               also export vLLM's metric names
    component_values   returns values of other components, such as the usage log, by name; names that end in `_total`
                       are counters
    """

    def __init__(self, *, vllm: bool = False, component_values: Values = dict) -> None:
        self._registry = CollectorRegistry()
        self._models, self._owners = LabelLimit(MAX_MODELS), LabelLimit(MAX_OWNERS)
        self._vllm, self._component_values = vllm, component_values
        self._snapshot = engine_metrics.EngineSnapshot()
        self._history = History()

        def counter(name: str, help_text: str, *labels: str) -> CounterSeries:
            return CounterSeries(Counter(f"sidestream_{name}", help_text, labels, registry=self._registry))

        def histogram(name: str, help_text: str, buckets: Sequence[float]) -> FastHistogram:
            return FastHistogram(f"sidestream_{name}", help_text, buckets, self._registry)

        self._http = counter("http_requests", "HTTP requests of any kind.", "route", "method", "status")
        self._open = Gauge("sidestream_requests_open", "Open generation requests.", registry=self._registry)
        self._requests = counter("requests", "Finished generation requests.", "model", "endpoint", "status", "error")
        self._by_model = {name: counter(name, help_text, "model") for name, help_text in _MODEL_COUNTERS.items()}
        self._owner_requests = counter("owner_requests", "Finished generation requests.", "owner")
        self._owner_tokens = counter("owner_tokens", "Tokens of prompts and answers.", "owner")
        self._owner_refused = counter("owner_refused", "Requests refused by a limit (429).", "owner")
        self._first_token_seconds = histogram(
            "first_token_seconds", "Time from a request to its first token.", FIRST_TOKEN_SECONDS
        )
        self._inter_token_seconds = histogram("inter_token_seconds", "Time between tokens of an answer.", TOKEN_SECONDS)
        self._request_token_seconds = histogram(
            "request_token_seconds", "A request's mean time per token after the first.", TOKEN_SECONDS
        )
        self._request_seconds = histogram("request_seconds", "Time from a request to its end.", REQUEST_SECONDS)
        self._by_phase = {
            phase: histogram(f"request_{phase}_seconds", help_text, buckets)
            for phase, (help_text, buckets) in _PHASES.items()
        }
        self._request_prompt_tokens = histogram("request_prompt_tokens", "Tokens of a request's prompts.", TOKENS)
        self._request_output_tokens = histogram("request_output_tokens", "Tokens of a request's answers.", TOKENS)
        self._request_computed_tokens = histogram(
            "request_computed_tokens", "Tokens of a request's prompts that were not in the prefix cache.", TOKENS
        )
        self._request_longest_tokens = histogram(
            "request_longest_tokens", "Tokens of the longest completion of a request.", TOKENS
        )
        self._request_max_tokens = histogram("request_max_tokens", "max_tokens of requests that set it.", TOKENS)
        self._request_completions = histogram("request_completions", "Completions per prompt (n).", COMPLETIONS)
        self._request_preemptions = histogram("request_preemptions", "Preemptions of a request.", PREEMPTIONS)
        self._finish_reasons = counter("completions", "Completions that ended, by reason.", "reason")
        ProcessCollector(registry=self._registry)
        self._registry.register(_CallbackCollector(self._collect))

    def on_admitted(self, request: AdmittedRequest) -> None:
        self._open.inc()

    def on_first_token(self, request: AdmittedRequest, seconds: float) -> None:
        self._first_token_seconds.observe(seconds)

    def on_chunks(self, request: AdmittedRequest, prompt_index: int, chunks: list[Chunk], seconds: float) -> None:
        first = False
        for chunk in chunks:
            first |= chunk.first == 0
            if chunk.finish_reason is not None:
                self._finish_reasons(chunk.finish_reason).inc()
        if not first:
            self._inter_token_seconds.observe(seconds)

    def on_finished(self, request: AdmittedRequest, record: UsageRecord) -> None:
        self._open.dec()
        if record.status >= 400:
            self._history.add_failed(record)
        model, owner = self._models(part_names(record.adapter or record.model)), self._owners(record.owner)
        self._requests(model, request.endpoint, str(record.status), record.error).inc()
        for name, series in self._by_model.items():
            series(model).inc(getattr(record, name))
        self._owner_requests(owner).inc()
        self._owner_tokens(owner).inc(record.prompt_tokens + record.output_tokens)
        self._request_seconds.observe(record.total_seconds)
        self._request_prompt_tokens.observe(record.prompt_tokens)
        self._request_output_tokens.observe(record.output_tokens)
        self._request_computed_tokens.observe(record.prompt_tokens - record.cached_tokens)
        self._request_longest_tokens.observe(record.longest_output_tokens)
        self._request_completions.observe(request.params.n)
        self._request_preemptions.observe(record.preemptions)
        if request.params.max_tokens is not None:
            self._request_max_tokens.observe(request.params.max_tokens)
        if record.engine_total_seconds:
            queued, end = record.engine_queue_seconds, record.engine_total_seconds
            first = record.engine_first_token_seconds or end
            for phase, seconds in (
                ("queue", queued),
                ("prefill", first - queued),
                ("decode", end - first),
                ("inference", end - queued),
            ):
                self._by_phase[phase].observe(max(0.0, seconds))
        if record.output_tokens > 1 and record.first_token_seconds:
            self._request_token_seconds.observe(
                max(0.0, record.total_seconds - record.first_token_seconds) / (record.output_tokens - 1)
            )

    def on_http_exchange(self, exchange: HttpExchange) -> None:
        method = exchange.method if exchange.method in METHODS else OTHER
        self._http(exchange.route or OTHER, method, str(exchange.status)).inc()
        if exchange.status >= 400:
            self._history.add_refused(exchange)
        if exchange.status == 429:
            self._owner_refused(self._owners(exchange.owner)).inc()

    async def metrics(self, engines: Engines) -> tuple[str, bytes]:
        self._snapshot = await engine_metrics.take_snapshot(engines)
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)

    async def add_sample(self, engines: Engines) -> None:
        self._snapshot = await engine_metrics.take_snapshot(engines)
        self._history.add_sample(self._registry.collect())

    def history(self, after: float) -> HistoryReport:
        return self._history.report(after)

    def _collect(self) -> Iterator[Metric]:
        yield from engine_metrics.engine_families(self._snapshot)
        for name, value in self._component_values().items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            help_text = f"The gateway's {name.removesuffix('_total').replace('_', ' ')}."
            yield kind(f"sidestream_{name.removesuffix('_total')}", help_text, value)
        if self._vllm:
            histograms: Mapping[str, Collector] = {
                "time_to_first_token_seconds": self._first_token_seconds,
                "inter_token_latency_seconds": self._inter_token_seconds,
                "time_per_output_token_seconds": self._inter_token_seconds,
                "request_time_per_output_token_seconds": self._request_token_seconds,
                "e2e_request_latency_seconds": self._request_seconds,
                "request_prompt_tokens": self._request_prompt_tokens,
                "request_generation_tokens": self._request_output_tokens,
                "request_max_num_generation_tokens": self._request_longest_tokens,
                "request_prefill_kv_computed_tokens": self._request_computed_tokens,
                "request_params_max_tokens": self._request_max_tokens,
                "request_params_n": self._request_completions,
                "request_num_preemptions": self._request_preemptions,
            } | {f"request_{phase}_time_seconds": histogram for phase, histogram in self._by_phase.items()}
            counters = {
                "prompt_tokens": self._by_model["prompt_tokens"].counter,
                "generation_tokens": self._by_model["output_tokens"].counter,
            }
            yield _http_requests(self._http.counter)
            yield from engine_metrics.vllm_families(self._snapshot, histograms, counters, self._finish_reasons.counter)


def _http_requests(counter: Counter) -> Metric:
    """Return the counter of HTTP requests with the name and labels that vLLM's dashboards query."""
    family = CounterMetricFamily("http_requests", "HTTP requests of any kind.", labels=["handler", "method", "status"])
    counts: dict[tuple[str, str, str], float] = {}
    for sample in next(iter(counter.collect())).samples:
        if sample.name.endswith("_total"):
            labels = sample.labels
            key = labels["route"], labels["method"], f"{labels['status'][0]}xx"
            counts[key] = counts.get(key, 0.0) + sample.value
    for key, value in counts.items():
        family.add_metric(key, value)
    return family


class _CallbackCollector(Collector):
    """Collects what a function yields at the time of a scrape."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()

    def describe(self) -> list[Metric]:
        return []
