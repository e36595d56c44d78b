"""Large bodies are decoded in a child process first, and mean the same as small ones."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from sidestream.runtime.gateway.api.chat.request import ChatRequest
from sidestream.runtime.gateway.api.completions import CompletionRequest
from sidestream.runtime.gateway.intake import body_decoder
from sidestream.runtime.gateway.intake.body_decoder import LARGE_BODY_BYTES, BodyDecoder, decode
from sidestream.runtime.gateway.interfaces import GatewayError
from support.gateway import FakeEngines, gateway

FIELDS: dict[str, Any] = {
    "model": "pirate", "max_tokens": 3, "temperature": 0.5, "top_p": 1, "stop": ["é\n", "\u2028"], "seed": 7, "n": 2,
    "logit_bias": {"5": -1.5}, "stream": True, "stream_options": {"include_usage": True}, "echo": False,
    "user": "\x01\"\\", "logprobs": 2, "response_format": {"type": "text"}, "priority": -3, "deadline_seconds": 1e3,
}  # fmt: skip
CHAT = {
    "messages": [{"role": "user", "content": "\n\x01x"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


@pytest.fixture(scope="module")
def decoder() -> Iterator[BodyDecoder]:
    decoder = BodyDecoder(1 << 20)
    yield decoder
    decoder.close()


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        (CompletionRequest, FIELDS | {"prompt": [[1, 2], [3], [2**31 - 1] * 9]}),
        (CompletionRequest, FIELDS | {"prompt": [1, 2]}),
        (CompletionRequest, {"prompt": "a\nb"}),
        (CompletionRequest, {"prompt": ["a", "b"], "stop": None}),
        (ChatRequest, CHAT),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_large_body_means_the_same_as_a_small_one(
    decoder: BodyDecoder, shape: type, body: dict[str, Any], indent: int | None
) -> None:
    data = json.dumps(body, indent=indent).encode()
    found = decoder.check(data, shape)
    assert found.model == body.get("model")
    assert asyncio.run(found.decode()) == decode(data, shape)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"prompt": 3}', b'{"prompt": [[1], ["x"]]}', b'{"prompt": "\xff"}', b'{"promt": "x"}', b"[" * 10_000],
    ids=lambda data: repr(data[:20]),
)
def test_a_large_malformed_body_gets_the_same_error(decoder: BodyDecoder, data: bytes) -> None:
    with pytest.raises(GatewayError) as expected:
        decode(data, CompletionRequest)
    with pytest.raises(GatewayError) as found:
        decoder.check(data, CompletionRequest)
    assert vars(found.value) == vars(expected.value)


def test_the_process_is_replaced_when_it_dies(decoder: BodyDecoder) -> None:
    decoder.check(b'{"prompt": "x"}', CompletionRequest)
    child = decoder._child._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert decoder.check(b'{"prompt": "x", "model": "m"}', CompletionRequest).model == "m"


def test_only_a_large_body_that_can_be_admitted_is_decoded_by_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[type] = []
    decoded = body_decoder.decode

    def counted(data: bytes, shape: type) -> Any:
        shapes.append(shape)
        return decoded(data, shape)

    monkeypatch.setattr(body_decoder, "decode", counted)
    ids = [[7] * (LARGE_BODY_BYTES // 8)] * 5
    json_type = {"Content-Type": "application/json"}

    async def run() -> None:
        engines = FakeEngines()
        async with gateway(engines) as http:
            for body, status in (
                ({"prompt": ids, "model": "missing"}, 404),
                ({"prompt": [*ids, ["x"]]}, 400),
                ({"prompt": ids, "max_tokens": 0.5}, 400),
            ):
                answer = await http.post("/v1/completions", json=body)
                assert answer.status_code == status and not shapes, answer.text
            answer = await http.post("/v1/completions", json={"prompt": ids, "max_tokens": 1})
            assert answer.status_code == 200 and shapes == [CompletionRequest]
            assert [request.prompt for request in engines.asked] == ids
            text = json.dumps({"prompt": "x", "max_tokens": 1}) + " " * LARGE_BODY_BYTES
            assert (await http.post("/v1/completions", content=text, headers=json_type)).status_code == 200

    asyncio.run(run())
