"""The day of history: bounded, with rates that a reader can compute, and the last failed requests."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.interfaces import AdmittedRequest, Caller, GatewayError, HttpExchange, UsageRecord
from sidestream.runtime.gateway.metrics import history
from sidestream.runtime.gateway.metrics.metrics import Metrics
from support.gateway import FakeEngines, gateway

PATH = "/v1/completions"
RECORD = UsageRecord(1e9, "r0", PATH, "search", "k", "base", "shout", "", 5, 0, 0, 0.0, 0.5, 503, "engine_dead")
REFUSED = HttpExchange(1e9, "x0", "POST", PATH, PATH, 429, 0.1, 9, "10.0.0.1", "search", "shout")
ADMITTED = AdmittedRequest("r", PATH, Caller("search", "k"), "", "shout", "shout", False, ["x"], SamplingParams())


def asked(key: str, metrics: Metrics, path: str = "/console/history") -> httpx.Response:
    async def scene() -> httpx.Response:
        async with gateway(FakeEngines(), NoAuth("user", "admin"), metrics) as http:
            return await http.get(path, headers={"Authorization": f"Bearer {key}"})

    return asyncio.run(scene())


def test_samples_are_sums_over_all_series_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_SAMPLES", 3)
    metrics = Metrics()
    engines = FakeEngines()
    now = 1000.0
    monkeypatch.setattr(history.time, "time", lambda: now)
    for number in range(5):
        now = 1000.0 + number
        metrics.on_finished(ADMITTED, replace(RECORD, request_id=f"r{number}", status=200 + 303 * (number % 2)))
        metrics.on_http_exchange(replace(REFUSED, request_id=f"x{number}", owner=f"o{number}"))
        asyncio.run(metrics.add_sample(engines))  # type: ignore[arg-type]
    body = asked("admin", metrics).json()
    rows = [dict(zip(body["names"], sample, strict=True)) for sample in body["samples"]]
    assert [(row["time"], row["requests"], row["failed"], row["refused"]) for row in rows] == [
        (1002, 3, 1, 3), (1003, 4, 2, 4), (1004, 5, 2, 5),
    ]  # fmt: skip
    later = asked("admin", metrics, "/console/history?after=1003").json()["samples"]
    assert later == body["samples"][2:]


def test_the_last_failed_requests_have_their_model_and_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_FAILED", 3)
    metrics = Metrics()
    metrics.on_finished(ADMITTED, RECORD)
    metrics.on_http_exchange(replace(REFUSED, request_id="r0", status=503))  # the same request
    metrics.on_http_exchange(REFUSED)
    metrics.on_http_exchange(replace(REFUSED, request_id="no key", owner=""))
    metrics.on_http_exchange(replace(REFUSED, request_id="probe", method="GET"))
    metrics.on_http_exchange(replace(REFUSED, request_id="fine", status=200))
    failed = asked("admin", metrics).json()["failed"]
    found = [(each["request_id"], each["model"], each["status"], each["error"], each["owner"]) for each in failed]
    assert found == [("x0", "shout", 429, "", "search"), ("r0", "shout", 503, "engine_dead", "search")]
    for number in range(1, 4):
        metrics.on_http_exchange(replace(REFUSED, request_id=f"x{number}"))
    assert [each["request_id"] for each in asked("admin", metrics).json()["failed"]] == ["x3", "x2", "x1"]


def test_a_request_over_a_limit_names_its_model() -> None:
    class Full(NoAuth):
        def admit(self, *arguments: object, **more: object) -> object:  # type: ignore[override]
            raise GatewayError(429, "too much")

    async def scene() -> list[tuple[str, int]]:
        metrics = Metrics()
        async with gateway(FakeEngines(), Full(), metrics) as http:
            await http.post("/v1/completions", json={"model": "pirate", "prompt": "x"})
            return [(each["model"], each["status"]) for each in (await http.get("/console/history")).json()["failed"]]

    assert asyncio.run(scene()) == [("pirate", 429)]


def test_it_needs_the_right_to_read_metrics_and_a_time() -> None:
    metrics = Metrics()
    assert asked("user", metrics).status_code == 403 and asked("", metrics).status_code == 401
    wrong = asked("admin", metrics, "/console/history?after=yesterday")
    assert wrong.status_code == 400 and "yesterday" in wrong.json()["error"]["message"]
