"""An OpenTelemetry span for each request that generates tokens (needs the extra `otel`).

The span continues the client's trace (`traceparent`). The engine's times are events in it. It contains no prompts and
no answers.
"""

from typing import TYPE_CHECKING, Any

from ..interfaces import AdmittedRequest, UsageRecord
from .observers import BaseObserver

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat"}
_REMEDY = "install the extra: pip install 'sidestream[otel]'"


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError unless `endpoint` is a URL."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otel-endpoint {endpoint[:200]} must be a URL such as http://localhost:4318/v1/traces")


def exporting_to(endpoint: str) -> "TracerProvider":
    """Return a provider that sends spans to the OTLP collector at a URL, in its own thread.

    Raises ValueError if a package is missing or `endpoint` is not a URL.
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


class Tracing(BaseObserver):
    """Creates spans. Raises ValueError without OpenTelemetry."""

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
        """Send pending spans, and shut down."""
        self._provider.shutdown()

    def on_admitted(self, request: AdmittedRequest) -> None:
        operation = _OPERATIONS.get(request.endpoint, "text_completion")
        params = request.params
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "http.route": request.endpoint,
            "client.address": request.client_host,
            "sidestream.request_id": request.request_id,
            "sidestream.owner": request.caller.owner,
        }
        self._spans[id(request)] = self._tracer.start_span(
            f"{operation} {request.model}",
            context=self._propagator.extract(request.headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=int(request.started * 1e9),
        )

    def on_first_token(self, request: AdmittedRequest, seconds: float) -> None:
        span = self._spans.get(id(request))
        if span is not None:
            span.add_event("first_token", timestamp=int((request.started + seconds) * 1e9))

    def on_finished(self, request: AdmittedRequest, record: UsageRecord) -> None:
        span = self._spans.pop(id(request), None)
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
        end = request.started + record.total_seconds
        if record.engine_total_seconds:
            # the engine's clock starts when the request reaches it, and ends with the answer
            engine_start = max(request.started, end - record.engine_total_seconds)
            for event, seconds in (
                ("engine.arrived", 0.0),
                ("engine.first_token", record.engine_first_token_seconds),
                ("engine.finished", record.engine_total_seconds),
            ):
                span.add_event(event, {"engine.seconds": seconds}, timestamp=int((engine_start + seconds) * 1e9))
        if record.error:
            span.set_attribute("error.type", record.error)
        if record.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR, record.error)
        span.end(end_time=int(end * 1e9))
