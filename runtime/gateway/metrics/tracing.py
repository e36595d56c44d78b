"""A span for each request for tokens, with OpenTelemetry (the extra `otel`). It continues the client's trace
(`traceparent`); the engine's own times are events in it. Prompts and answers are not in it.
"""

from typing import TYPE_CHECKING, Any

from ..contracts import Exchange, UsageRecord
from .listener import Listener

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat"}
_REMEDY = "install the extra: pip install 'sidestream[otel]'"


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError for what is no URL."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otel-endpoint {endpoint[:200]} must be a URL such as http://localhost:4318/v1/traces")


def exporting_to(endpoint: str) -> "TracerProvider":
    """What sends spans to an OTLP collector at this URL (http://localhost:4318/v1/traces), in a thread of its own.

    Raises ValueError without the packages, or for what is no URL.
    """
    check_endpoint(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"--otel-endpoint needs the package {error.name}; {_REMEDY}") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "sidestream-gateway"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


class Tracing(Listener):
    """Makes spans of the provider. Raises ValueError without OpenTelemetry."""

    def __init__(self, provider: "TracerProvider") -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(f"spans need the package {error.name}; {_REMEDY}") from None
        self._trace: Any = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = provider
        self._tracer = provider.get_tracer("sidestream.gateway")
        self._spans: dict[int, Span] = {}

    def close(self) -> None:
        """Send what is left, and end."""
        self._provider.shutdown()

    def begun(self, exchange: Exchange) -> None:
        """See `Observer`."""
        operation = _OPERATIONS.get(exchange.endpoint, "text_completion")
        params = exchange.params
        asked = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": exchange.model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "http.route": exchange.endpoint,
            "client.address": exchange.client_host,
            "sidestream.request_id": exchange.request_id,
            "sidestream.owner": exchange.caller.owner,
        }
        self._spans[id(exchange)] = self._tracer.start_span(
            f"{operation} {exchange.model}",
            context=self._propagator.extract(exchange.headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={name: value for name, value in asked.items() if value is not None},
            start_time=int(exchange.started * 1e9),
        )

    def first_token(self, exchange: Exchange, seconds: float) -> None:
        """See `Observer`."""
        span = self._spans.get(id(exchange))
        if span is not None:
            span.add_event("first_token", timestamp=int((exchange.started + seconds) * 1e9))

    def finished(self, exchange: Exchange, record: UsageRecord) -> None:
        """See `Observer`."""
        span = self._spans.pop(id(exchange), None)
        if span is None:
            return
        span.set_attributes(
            {
                "gen_ai.response.model": record.adapter or record.model,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.output_tokens,
                "sidestream.cached_tokens": record.cached_tokens,
                "sidestream.adapter.content": record.adapter_content,
                "http.response.status_code": record.status,
            }
        )
        end = exchange.started + record.total_seconds
        if record.engine_total_seconds:
            # the engine's clock starts when the request reaches it, and its last times are those of the answer's end
            reached = max(exchange.started, end - record.engine_total_seconds)
            for event, seconds in (
                ("engine.arrived", 0.0),
                ("engine.first_token", record.engine_first_token_seconds),
                ("engine.finished", record.engine_total_seconds),
            ):
                span.add_event(event, {"engine.seconds": seconds}, timestamp=int((reached + seconds) * 1e9))
        if record.error:
            span.set_attribute("error.type", record.error)
        if record.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR, record.error)
        span.end(end_time=int(end * 1e9))
