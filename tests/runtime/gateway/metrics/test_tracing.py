"""Spans as OpenTelemetry's in-memory exporter receives them."""

import sys
from dataclasses import replace

import pytest
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import AdmittedRequest, Caller, UsageRecord
from sidestream.runtime.gateway.metrics.tracing import Tracing, exporting_to

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

TRACE = "0af7651916cd43dd8448eb211c80319c"
EXCHANGE = AdmittedRequest(
    "r1", "/v1/chat/completions", Caller("search"), "10.0.0.1", "sql", "sql", True, ["my secret"],
    SamplingParams(max_tokens=7), {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, 1_900_000_000.0,
)  # fmt: skip
RECORD = UsageRecord(
    1_900_000_000.0, "r1", "/v1/chat/completions", "search", "", "llama", "sql", "aa", 10, 5, 4, 0.25, 1.5, 200, "",
    0.125, 1.25,
)  # fmt: skip


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def test_a_request_is_one_span_in_its_clients_trace(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.on_admitted(EXCHANGE)
    tracing.on_first_token(EXCHANGE, 0.25)
    tracing.on_finished(EXCHANGE, RECORD)
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat sql" and span.kind is SpanKind.SERVER
    assert format(span.context.trace_id, "032x") == TRACE and span.parent is not None
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert span.start_time == 1_900_000_000 * 10**9 and span.end_time == span.start_time + 1_500_000_000
    assert [(event.name, round((event.timestamp - span.start_time) / 1e9, 3)) for event in span.events] == [
        ("first_token", 0.25),
        ("engine.arrived", 0.25),
        ("engine.first_token", 0.375),
        ("engine.finished", 1.5),
    ]
    told = dict(span.attributes or {})
    assert told["gen_ai.usage.input_tokens"] == 10 and told["gen_ai.usage.output_tokens"] == 5
    assert told["gen_ai.request.max_tokens"] == 7 and told["sidestream.adapter.content"] == "aa"
    assert "secret" not in span.to_json()


@pytest.mark.parametrize("header", [None, "", "00-zz-b7-01", "x" * 10_000, f"00-{'0' * 32}-b7ad6b7169203331-01"])
def test_without_a_parent_a_trace_begins(tracing: Tracing, exporter: InMemorySpanExporter, header: str | None) -> None:
    exchange = replace(EXCHANGE, headers={} if header is None else {"traceparent": header})
    tracing.on_admitted(exchange)
    tracing.on_finished(exchange, replace(RECORD, engine_total_seconds=0.0))
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and span.context.trace_id and not span.events


def test_faults_are_marked_and_refusals_are_not(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    for status, error in ((503, "engine_dead"), (499, "client_gone")):
        tracing.on_admitted(EXCHANGE)
        tracing.on_finished(EXCHANGE, replace(RECORD, status=status, error=error))
    dead, gone = exporter.get_finished_spans()
    assert dead.status.status_code is StatusCode.ERROR and gone.status.status_code is StatusCode.UNSET
    assert dead.attributes is not None and dead.attributes["error.type"] == "engine_dead"
    tracing.close()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="must be a URL"):
        exporting_to("collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"sidestream\[otel\]"):
        exporting_to("http://collector:4318/v1/traces")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ValueError, match=r"sidestream\[otel\]"):
        Tracing(TracerProvider())
