"""Bodies that are too large, too slow or not JSON, and the OpenAPI document."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from sidestream.runtime.gateway.api.pages import ENDPOINTS, openapi_document
from sidestream.runtime.gateway.app import build_app
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from sidestream.runtime.gateway.settings import GatewaySettings
from support.gateway import FakeEngines, gateway

JSON = {"Content-Type": "application/json"}


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x"} more',
        b"[1]",
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"prompt": "x", "seed": 99999999999999999999999}',
        b'{"prompt": "x", "\\u0000": 1}',
    ],
)
def test_no_body_but_json_of_the_right_shape_is_taken(body: bytes) -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            answer = await http.post("/v1/completions", content=body, headers=JSON)
            after = await http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 400, answer.text
        assert len(answer.text) < 1000 and answer.json()["error"]["message"]
        assert after.status_code == 200

    run(scene)


def test_a_body_over_the_limit_is_told_by_its_length_and_as_it_comes() -> None:
    async def scene() -> None:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(64):
                yield b" " * 1024

        async with gateway(FakeEngines(), max_body_bytes=10_000) as http:
            told = await http.post("/v1/completions", content=b" " * 10_001, headers=JSON)
            chunked = await http.post("/v1/completions", content=parts(), headers=JSON)
            fits = await http.post("/v1/completions", content=b'{"prompt": "x"}'.ljust(10_000), headers=JSON)
        assert (told.status_code, chunked.status_code, fits.status_code) == (413, 413, 200)

    run(scene)


@pytest.mark.parametrize(("declared", "status"), [("15".zfill(5000), 200), ("9" * 5000, 413), ("99999".zfill(40), 413)])
def test_a_length_may_have_any_number_of_digits(declared: str, status: int) -> None:
    async def scene() -> None:
        async with gateway(FakeEngines(), max_body_bytes=100) as http:
            headers = JSON | {"Content-Length": declared}
            answer = await http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == status, answer.text

    run(scene)


def test_a_body_that_is_not_called_json_is_refused() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            form = await http.post("/v1/completions", data={"prompt": "x"})
            typed = await http.post(
                "/v1/completions",
                content=b'{"prompt": "x"}',
                headers={"Content-Type": "application/json; charset=utf-8"},
            )
        assert (form.status_code, typed.status_code) == (415, 200)

    run(scene)


def test_a_slow_body_ends_with_408() -> None:
    async def scene() -> None:
        async def parts() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(120)
            yield b"}"

        async with gateway(FakeEngines(), body_seconds=0.05) as http:
            answer = await http.post("/v1/completions", content=parts(), headers=JSON)
        assert answer.status_code == 408

    run(scene)


def test_the_document_has_every_route_and_every_route_is_documented() -> None:
    app = build_app(FakeEngines(), NoAuth(), CompositeObserver(Metrics()), GatewaySettings())
    served = {
        (method.lower(), route.path.replace(":path", "").rstrip("/") or "/")  # type: ignore[attr-defined]
        for route in app.router.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert served == {(each.method, each.path) for each in ENDPOINTS}
    schemas = openapi_document("1")["components"]["schemas"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["ChatRequest"]["additionalProperties"] is False, "a misspelt field is refused"


def test_the_page_of_the_document_loads_nothing_from_anywhere() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            page = await http.get("/docs")
        assert "max_completion_tokens" in page.text and "/v1/chat/completions" in page.text
        assert "src=" not in page.text and "http://" not in page.text and "https://" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]

    run(scene)
