"""--root-path: a proxy's prefix is served like no prefix, and no path with it needs fewer rights than one without."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError
from sidestream.runtime.gateway.addresses import parse_root_path
from support.gateway import Books, FakeEngines, gateway

KEY = {"Authorization": "Bearer secret"}


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


def test_openai_s_client_is_answered_below_the_prefix_with_the_key_only() -> None:
    async def scene() -> None:
        books = Books("secret")
        async with gateway(FakeEngines(), books, root_path="/team/llm") as http:
            for base in ("/v1", "/team/llm/v1"):
                for key in ("secret", "secre"):
                    client = AsyncOpenAI(
                        api_key=key, base_url=f"http://localhost{base}", http_client=http, max_retries=0
                    )
                    asked = client.completions.create(model="base", prompt="x", max_tokens=2)
                    if key == "secret":
                        assert (await asked).choices[0].text == "a b "
                    else:
                        with pytest.raises(AuthenticationError):
                            await asked
        assert [record.endpoint for record in books.records] == ["/v1/completions"] * 2

    run(scene)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/llm/v1/models", 401),
        ("/llm%2Fv1/models", 401),
        ("/llm/%76%31/models", 401),
        ("/llm/llm/v1/models", 401),
        ("/llm/llm/health", 401),
        ("/llmx/health", 401),
        ("/llm//v1/models", 401),
        ("/health/llm/v1/models", 401),
        ("/docs/llm", 401),
        ("/llm/metrics", 401),
        ("/llm/health", 200),
        ("/llm%2Fhealth", 200),
        ("/llm/docs", 200),
        ("/llm/", 200),
        ("/llm", 200),
    ],
)
def test_no_spelling_of_a_path_avoids_the_key(path: str, status: int) -> None:
    async def scene() -> None:
        async with gateway(FakeEngines(), Books("secret"), root_path="/llm") as http:
            assert (await http.get(path)).status_code == status
            exists = path in ("/llm/v1/models", "/llm%2Fv1/models", "/llm/%76%31/models", "/llm/metrics")
            if status == 401:
                assert (await http.get(path, headers=KEY)).status_code == (200 if exists else 404)

    run(scene)


def test_a_path_that_only_starts_like_the_prefix_is_without_it() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines(), root_path="/ver") as http:
            for path in ("/version", "/ver/version"):
                assert (await http.get(path)).json().keys() == {"version"}

    run(scene)


def test_documents_errors_and_redirections_have_the_prefix() -> None:
    async def scene() -> None:
        for prefix in ("/llm", ""):
            async with gateway(FakeEngines(), root_path=prefix) as http:
                document = (await http.get(f"{prefix}/openapi.json")).json()
                assert document["servers"] == [{"url": prefix or "/"}]
                moved = await http.post(f"{prefix}/v1/completions/?a=b", json={"prompt": "x"})
                assert moved.status_code == 307 and moved.headers["location"].endswith(f"{prefix}/v1/completions?a=b")
                message = await http.post(f"{prefix}/v1/messages", json={})
                assert message.json()["type"] == "error" and "request-id" in message.headers

    run(scene)


def test_a_page_of_another_origin_changes_no_adapter_below_the_prefix() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        headers = {"Origin": "https://evil.example", "Content-Type": "application/json"}
        async with gateway(engines, root_path="/llm", allowed_origins=["*"]) as http:
            for path in ("/llm/v1/load_lora_adapter", "/llm%2Fv1/load_lora_adapter"):
                answer = await http.post(path, json={"lora_name": "x", "lora_path": "/x"}, headers=headers)
                assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert not engines.calls

    run(scene)


@pytest.mark.parametrize(("given", "prefix"), [("", ""), ("/", ""), ("/llm", "/llm"), ("/a/b-c.d/", "/a/b-c.d")])
def test_a_prefix_ends_without_a_slash(given: str, prefix: str) -> None:
    assert parse_root_path(given) == prefix


@pytest.mark.parametrize("given", ["llm", "/a b", "/a//b", "/..", "/a/../b", "/a?b", "/%2e", "/v1", "/v1/x", "/a\n"])
def test_what_is_no_prefix_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"--root-path: .* is not the prefix of a proxy; .* as in /llm"):
        parse_root_path(given)
