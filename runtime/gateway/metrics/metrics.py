"""Prometheus metrics of the gateway. No label's values come from clients: an adapter is counted by name once the
engines have served it, everything else comes from the routes, the keys file or the engines.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ...protocol.messages import Chunk
from ..contracts import Engines, Exchange, HttpAnswer, UsageRecord
from . import engine_numbers, vllm_names
from .labels import OTHER, Labels, Series
from .listener import Listener
from .quick_histogram import QuickHistogram

MAX_MODELS = 512
MAX_OWNERS = 1024
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"})
# vLLM's, so that its dashboards' quantiles are as fine
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
TOKEN_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

Numbers = Callable[[], Mapping[str, int | float]]


class Metrics(Listener):
    """An `Observer` that counts, and answers /metrics.

    vllm      also under vLLM's names
    further   numbers of other parts of the gateway, such as the usage log; names that end in `_total` are counters
    """

    def __init__(self, *, vllm: bool = False, further: Numbers = dict) -> None:
        self._registry = CollectorRegistry()
        self._models, self._owners = Labels(MAX_MODELS), Labels(MAX_OWNERS)
        self._vllm, self._further = vllm, further
        self._seen = engine_numbers.Snapshot()

        def counter(name: str, words: str, *labels: str) -> Series:
            return Series(Counter(f"sidestream_{name}", words, labels, registry=self._registry))

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"sidestream_{name}", words, registry=self._registry, buckets=buckets)

        self._http = counter("http_requests", "HTTP requests of any kind.", "route", "method", "status")
        self._open = Gauge("sidestream_requests_open", "Requests for tokens that are open.", registry=self._registry)
        self._requests = counter("requests", "Requests for tokens that ended.", "model", "endpoint", "status", "error")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.", "model")
        self._cached = counter("cached_tokens", "Tokens of prompts that were found in the prefix cache.", "model")
        self._output = counter("output_tokens", "Tokens of answers.", "model")
        self._drafts = counter("draft_tokens", "Drafts of tokens that were computed.", "model")
        self._accepted = counter("accepted_tokens", "Drafts that became tokens of answers.", "model")
        self._history_drafts = counter(
            "history_draft_tokens", "Those of the drafts that came from former answers.", "model"
        )
        self._history_accepted = counter(
            "history_accepted_tokens", "Those of the accepted drafts that came from former answers.", "model"
        )
        self._trained_drafts = counter(
            "trained_draft_tokens", "Those of the drafts that a trained draft made.", "model"
        )
        self._trained_accepted = counter(
            "trained_accepted_tokens", "Those of the accepted drafts that a trained draft made.", "model"
        )
        self._owner_requests = counter("owner_requests", "Requests for tokens that ended.", "owner")
        self._owner_tokens = counter("owner_tokens", "Tokens of prompts and answers.", "owner")
        self._owner_refused = counter("owner_refused", "Requests that a limit refused (429).", "owner")
        self.first_token_seconds = histogram(
            "first_token_seconds", "From a request to its first token.", FIRST_TOKEN_SECONDS
        )
        self.inter_token_seconds = QuickHistogram(
            "sidestream_inter_token_seconds", "From tokens to the next ones.", TOKEN_SECONDS, self._registry
        )
        self.request_token_seconds = histogram(
            "request_token_seconds", "A request's mean time for each token after the first.", TOKEN_SECONDS
        )
        self.request_seconds = histogram("request_seconds", "From a request to its end.", REQUEST_SECONDS)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Tokens of a request's prompts.", TOKENS)
        self.request_output_tokens = histogram("request_output_tokens", "Tokens of a request's answers.", TOKENS)
        self.finished_reasons = counter("completions", "Completions that ended, by reason.", "reason")
        ProcessCollector(registry=self._registry)
        self._registry.register(_Further(self._collect))

    def begun(self, exchange: Exchange) -> None:
        """See `Observer`."""
        self._open.inc()

    def first_token(self, exchange: Exchange, seconds: float) -> None:
        """See `Observer`."""
        self.first_token_seconds.observe(seconds)

    def arrived(self, exchange: Exchange, place: int, chunks: list[Chunk], seconds: float) -> None:
        """See `Observer`."""
        first = False
        for chunk in chunks:
            first |= chunk.first == 0
            if chunk.finish_reason is not None:
                self.finished_reasons(chunk.finish_reason).inc()
        if not first:
            self.inter_token_seconds.observe(seconds)

    def finished(self, exchange: Exchange, record: UsageRecord) -> None:
        """See `Observer`."""
        self._open.dec()
        model, owner = self._models(record.adapter or record.model), self._owners(record.owner)
        self._requests(model, exchange.endpoint, str(record.status), record.error).inc()
        self._prompt(model).inc(record.prompt_tokens)
        self._cached(model).inc(record.cached_tokens)
        self._output(model).inc(record.output_tokens)
        self._drafts(model).inc(record.draft_tokens)
        self._accepted(model).inc(record.accepted_tokens)
        self._history_drafts(model).inc(record.history_draft_tokens)
        self._history_accepted(model).inc(record.history_accepted_tokens)
        self._trained_drafts(model).inc(record.trained_draft_tokens)
        self._trained_accepted(model).inc(record.trained_accepted_tokens)
        self._owner_requests(owner).inc()
        self._owner_tokens(owner).inc(record.prompt_tokens + record.output_tokens)
        self.request_seconds.observe(record.total_seconds)
        self.request_prompt_tokens.observe(record.prompt_tokens)
        self.request_output_tokens.observe(record.output_tokens)
        if record.output_tokens > 1 and record.first_token_seconds:
            self.request_token_seconds.observe(
                max(0.0, record.total_seconds - record.first_token_seconds) / (record.output_tokens - 1)
            )

    def answered(self, answer: HttpAnswer) -> None:
        """See `Observer`."""
        method = answer.method if answer.method in METHODS else OTHER
        self._http(answer.route or OTHER, method, str(answer.status)).inc()
        if answer.status == 429:
            self._owner_refused(self._owners(answer.owner)).inc()

    async def metrics(self, engines: Engines) -> tuple[str, bytes]:
        """See `Observer`."""
        self._seen = await engine_numbers.look(engines)
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def _collect(self) -> Iterator[Metric]:
        yield from engine_numbers.families(self._seen)
        for name, value in self._further().items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            words = f"The gateway's {name.removesuffix('_total').replace('_', ' ')}."
            yield kind(f"sidestream_{name.removesuffix('_total')}", words, value)
        if self._vllm:
            own: dict[str, Collector] = {
                "time_to_first_token_seconds": self.first_token_seconds,
                "inter_token_latency_seconds": self.inter_token_seconds,
                "time_per_output_token_seconds": self.inter_token_seconds,
                "request_time_per_output_token_seconds": self.request_token_seconds,
                "e2e_request_latency_seconds": self.request_seconds,
                "request_prompt_tokens": self.request_prompt_tokens,
                "request_generation_tokens": self.request_output_tokens,
            }
            counters = {"prompt_tokens": self._prompt.counter, "generation_tokens": self._output.counter}
            yield from vllm_names.families(self._seen, own, counters, self.finished_reasons.counter)


class _Further(Collector):
    """What is not counted here but read when it is asked for."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()

    def describe(self) -> list[Metric]:
        return []
