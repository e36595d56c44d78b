"""Sampling defaults of a model over HTTP, field by field and endpoint by endpoint."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sidestream import AsyncClient, Client, SamplingParams
from sidestream.runtime.api.sampling_defaults import SamplingDefaults
from sidestream.runtime.gateway.router.router import Router
from support.gateway import FakeEngines, gateway
from support.serving import known_model, serve_fake
from support.wire_server import WireServer

MODELS = SamplingDefaults(temperature=0.6, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05, max_tokens=7)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}
MOST = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
}
PLAIN = SamplingParams(max_tokens=None)


def asked(path: str, defaults: SamplingDefaults, **fields: Any) -> SamplingParams:
    """The parameters that reach the engine."""
    engines = FakeEngines()
    engines.info = replace(engines.info, sampling_defaults=defaults)

    async def scene() -> None:
        async with gateway(engines) as http:
            answer = await http.post(path, json={**BODIES[path], **fields})
            assert answer.status_code == 200, answer.text

    asyncio.run(scene())
    return engines.asked[0].params


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_fields_that_a_body_does_not_set_are_the_models(path: str, stream: bool) -> None:
    usual = replace(PLAIN, **MODELS.given())
    assert asked(path, MODELS, stream=stream) == usual
    assert asked(path, MODELS, stream=stream, temperature=None) == usual, "null is not set"
    for field, value in (("temperature", 0), ("top_p", 1), ("top_k", 0), ("min_p", 0)):
        assert asked(path, MODELS, stream=stream, **{field: value}) == replace(usual, **{field: value})
    assert asked(path, MODELS, stream=stream, **{MOST[path]: 9}) == replace(usual, max_tokens=9)
    if path != "/v1/responses":
        assert asked(path, MODELS, stream=stream, repetition_penalty=1) == replace(usual, repetition_penalty=1)


@pytest.mark.parametrize("path", BODIES)
def test_without_defaults_all_is_as_openai_has_it(path: str) -> None:
    most = 16 if path == "/v1/completions" else None
    assert asked(path, SamplingDefaults()) == replace(PLAIN, max_tokens=most)
    assert asked(path, SamplingDefaults(max_tokens=40)).max_tokens == (16 if most else 40), (
        "OpenAI's own default is lower"
    )


def test_an_answer_repeats_them() -> None:
    engines = FakeEngines()
    engines.info = replace(engines.info, sampling_defaults=MODELS)

    async def scene() -> dict[str, Any]:
        async with gateway(engines) as http:
            return dict((await http.post("/v1/responses", json={"input": "x"})).json())

    answer = asyncio.run(scene())
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.8)


def test_engines_report_them_to_the_router_and_to_clients(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with WireServer(f"ipc://{tmp_path}/a", sampling_defaults=MODELS) as server:

        async def model() -> SamplingDefaults:
            router = Router([server.address], poll_seconds=0.05)
            await router.start()
            try:
                return (await known_model(router)).sampling_defaults
            finally:
                await router.close()

        assert asyncio.run(model()) == MODELS

        async def ask() -> None:
            async with AsyncClient(server.address) as client:
                await client.generate(["x"])
                await client.generate(["x", "y"], [None, SamplingParams(max_tokens=2)])
                async for _ in client.stream("x"):
                    pass

        asyncio.run(ask())
        sent = [(each.sampling.temperature, each.sampling.top_k, each.sampling.max_tokens) for each in server.submits]
        assert sorted(sent) == [(0.6, 20, 7)] * 3 + [(1.0, 0, 2)], "given parameters are sent as they are"
        with Client(server.address) as client:
            assert client.get_default_sampling_params() == MODELS.params()


@pytest.mark.parametrize("source", ["auto", "vllm"])
def test_a_server_reads_them(tmp_path: Path, source: str) -> None:
    (tmp_path / "model").mkdir()
    fields = {"temperature": 0.3, "top_k": 4, "top_p": "x", "do_sample": False}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(fields))
    with serve_fake(tmp_path, generation_config=source) as server, Client(server.address) as client:
        taken = SamplingDefaults(temperature=0.3, top_k=4) if source == "auto" else SamplingDefaults()
        assert client.connect().sampling_defaults == taken
        log = (tmp_path / "server.log").read_text()
    assert ("sets the sampling defaults temperature 0.3, top_k 4" in log) is (source == "auto")
    assert ("top_p='x' must be a number" in log) is (source == "auto")


def test_a_server_overrides_them(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 4}))
    override = {"temperature": 0.9, "max_new_tokens": 5}
    with serve_fake(tmp_path, override_generation_config=override) as server, Client(server.address) as client:
        taken = SamplingDefaults(temperature=0.9, top_k=4, max_tokens=5)
        assert client.connect().sampling_defaults == taken
    log = (tmp_path / "server.log").read_text()
    assert "the sampling defaults are temperature 0.9, top_k 4, max_new_tokens 5 (" in log
