"""Usage records when the GPU process is killed, and the metrics that the dashboard reads."""

import asyncio
import gzip
import json
import os
import random
import re
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sidestream.runtime.gateway.app import build_app, component_values
from sidestream.runtime.gateway.auth import edit_keys_file
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.auth.key_store import Key, KeyStore
from sidestream.runtime.gateway.auth.usage_log import UsageLog
from sidestream.runtime.gateway.interfaces import Admission
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from sidestream.runtime.gateway.metrics.tracing import Tracing, exporting_to
from sidestream.runtime.gateway.router.router import Router
from sidestream.runtime.gateway.settings import GatewaySettings
from support.listening import listening
from support.serving import Server, serve_fake

DOCS = Path(__file__).parents[4] / "docs"
DASHBOARD, PAGE = DOCS / "deploy" / "grafana.json", DOCS / "serving.md"
TOKENS, LONG = 60, 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_fake(tmp_path_factory.mktemp("live"), adapters=3, step_seconds=0.003) as server:
        yield server


@asynccontextmanager
async def ready(server: Server, observer: CompositeObserver, admission: Admission) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway over the server, which takes requests."""
    app = build_app(Router([server.address], poll_seconds=0.1), admission, observer, GatewaySettings())
    async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=90) as http:
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.05)
        yield http


async def one(http: httpx.AsyncClient, number: int, leaves_after: int | None) -> int:
    """A stream of TOKENS tokens, or a longer one that the client leaves after some events; how many events it saw."""
    seen = 0
    body: dict[str, Any] = {
        "model": f"a{number % 3}", "prompt": [number + 1] * (number + 1), "temperature": 0,
        "max_tokens": LONG if leaves_after else TOKENS,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": f"n{number}"}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event
                seen += 1
                if seen == leaves_after:
                    break
                if event.get("usage"):
                    assert event["usage"]["completion_tokens"] == TOKENS
                    assert event["usage"]["prompt_tokens"] == number + 1
    return seen


def test_usage_is_exact_when_the_gpu_process_is_killed(server: Server, tmp_path: Path) -> None:
    """Streams that stay are whole and counted once; those that left are counted with their prompts."""
    draw = random.Random(3)
    leaves = {number: draw.randint(1, 20) for number in range(36) if number % 3 == 0}
    log = UsageLog(tmp_path / "usage.db")

    async def scene() -> list[int]:
        async with asyncio.timeout(100), ready(server, CompositeObserver(Metrics(), [log]), NoAuth()) as http:
            streams = [asyncio.create_task(one(http, number, leaves.get(number))) for number in range(36)]
            while (await http.get("/metrics")).text.count("sidestream_inter_token_seconds_count 0.0"):
                await asyncio.sleep(0.02)
            os.kill(server.child("fake_gpu"), signal.SIGKILL)
            seen = await asyncio.gather(*streams)
        log.close()
        return seen

    seen = asyncio.run(scene())
    assert all(seen[number] == leaves[number] for number in leaves)
    with closing(sqlite3.connect(tmp_path / "usage.db")) as connection:
        found = connection.execute(
            "SELECT request_id, adapter, prompt_tokens, output_tokens, status FROM usage"
        ).fetchall()
    assert len(found) == 36 and any(status == 499 for *_, status in found)
    for request_id, adapter, prompt, output, status in found:
        number = int(request_id[1:])
        assert (adapter, prompt) == (f"a{number % 3}", number + 1)
        if number in leaves:
            # one that the server had finished before it heard that nobody reads is whole
            assert (status, output) == (200, LONG) or (status == 499 and seen[number] <= output < LONG)
        else:
            assert (status, output) == (200, TOKENS)


def test_the_dashboard_and_the_page_name_metrics_that_exist(server: Server, tmp_path: Path) -> None:
    edit_keys_file.add(tmp_path / "keys.toml", Key("one", "", "somebody"))
    book, log = KeyStore(tmp_path / "keys.toml"), UsageLog(tmp_path / "usage.db")
    metrics = Metrics(component_values=lambda: component_values(book, log, None))

    async def scene() -> str:
        async with asyncio.timeout(100), ready(server, CompositeObserver(metrics), NoAuth()) as http:
            answer = await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3, "model": "a0"})
            assert answer.status_code == 200, answer.text
            return (await http.get("/metrics")).text

    text = asyncio.run(scene())
    log.close()
    families = list(text_string_to_metric_families(text))
    samples = {sample.name for family in families for sample in family.samples}
    samples |= {f"{family.name}_total" for family in families if family.type == "counter"}  # labels never seen yet
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    named = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"\b(?:sidestream|process)_[a-z_]+", target["expr"])
    }
    named |= set(re.findall(r"\bsidestream_[a-z_]*[a-z]\b(?!_)", PAGE.read_text()))
    assert len(panels) == 24 and len(named) > 30
    assert named - samples == set()


def test_a_collector_gets_spans_with_the_engines_events(server: Server) -> None:
    """OTLP over HTTP, to a receiver that reads OpenTelemetry's own protobuf messages."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[tuple[str, ExportTraceServiceRequest]] = []
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    async def scene(tracing: Tracing) -> None:
        async with asyncio.timeout(100), ready(server, CompositeObserver(Metrics(), [tracing]), NoAuth()) as http:
            asked = {"model": "a0", "prompt": "my secret", "max_tokens": 30, "ignore_eos": True, "stream": True}
            header = {"traceparent": f"00-{trace}-{parent}-01"}
            assert (await http.post("/v1/completions", json=asked, headers=header)).text.endswith("[DONE]\n\n")

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracing = Tracing(exporting_to(f"http://127.0.0.1:{collector.server_port}/v1/traces"))
        asyncio.run(scene(tracing))
        tracing.close()
        collector.shutdown()
    ((path, told),) = received
    (resource,) = told.resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    (span,) = resource.scope_spans[0].spans
    attributes = {each.key: each.value for each in span.attributes}
    assert path == "/v1/traces" and names["service.name"] == "sidestream-gateway"
    assert span.name == "text_completion a0" and (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    events = {event.name: event.time_unix_nano for event in span.events}
    arrived, first, finished = (events[f"engine.{name}"] for name in ("arrived", "first_token", "finished"))
    assert span.start_time_unix_nano <= arrived < first < finished <= span.end_time_unix_nano
    assert span.start_time_unix_nano < events["first_token"] <= span.end_time_unix_nano
    assert attributes["gen_ai.usage.output_tokens"].int_value == 30
    assert len(attributes["sidestream.adapter.content"].string_value) == 64
    assert b"secret" not in told.SerializeToString()


def test_the_phases_of_requests_are_measured_by_the_engine(tmp_path: Path) -> None:
    """Three requests one after the other: two of them wait in the queue for what the others take."""

    async def scene(server: Server) -> tuple[dict[str, float], float]:
        async with ready(server, CompositeObserver(Metrics(vllm=True)), NoAuth()) as http:
            body = {"max_tokens": 10, "ignore_eos": True, "temperature": 0}
            await asyncio.gather(
                *(http.post("/v1/completions", json=body | {"prompt": [each] * 70}) for each in (3, 4, 5))
            )
            families = text_string_to_metric_families((await http.get("/metrics")).text)
            return {sample.name: sample.value for each in families for sample in each.samples}, 3 * (70 + 10)

    with serve_fake(tmp_path, max_num_seqs=1, step_seconds=0.02) as server:
        found, tokens = asyncio.run(scene(server))
    phase = {name: found[f"vllm:request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode")}
    assert found["vllm:request_queue_time_seconds_count"] == 3
    # how long each phase takes depends on when the processes run; that they follow one another does not
    assert all(seconds > 0 for seconds in phase.values())
    assert sum(phase.values()) <= found["vllm:e2e_request_latency_seconds_sum"]
    assert found["vllm:request_max_num_generation_tokens_sum"] == 30
    assert tokens - 3 <= found["vllm:iteration_tokens_total_sum"] <= tokens
    assert found["vllm:iteration_tokens_total_count"] >= 27 and found["vllm:iteration_tokens_total_bucket"] >= 27
