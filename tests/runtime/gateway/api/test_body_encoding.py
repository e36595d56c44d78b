"""Bodies that are compressed, that begin with a byte order mark, or that write integers as decimal numbers."""

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway.api.completions import CompletionRequest
from sidestream.runtime.gateway.intake.body_decoder import LARGE_BODY_BYTES, BodyDecoder
from support.gateway import FakeEngines, gateway

JSON = {"Content-Type": "application/json"}
GZIP = JSON | {"Content-Encoding": "gzip"}
PROMPT = b'{"prompt": "a prompt", "max_tokens": 2}'


def post(content: Any, headers: dict[str, str], path: str = "/v1/completions", **settings: Any) -> httpx.Response:
    async def scene() -> httpx.Response:
        async with gateway(FakeEngines(), **settings) as http:
            return await http.post(path, content=content, headers=headers)

    return asyncio.run(scene())


async def in_parts(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", " GZIP ", "identity", ""])
def test_a_gzip_body_is_read(encoding: str) -> None:
    content = PROMPT if encoding in ("identity", "") else gzip.compress(PROMPT)
    answer = post(content, JSON | {"Content-Encoding": encoding})
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == len("a prompt")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_gzip_body_may_arrive_in_parts_and_have_several_members(size: int) -> None:
    data = gzip.compress(PROMPT[:20]) + gzip.compress(b"") + gzip.compress(PROMPT[20:])
    answer = post(in_parts(data, size), GZIP)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == len("a prompt")


def test_a_large_gzip_body_is_decoded_in_the_child_process() -> None:
    prompt = [[7] * (LARGE_BODY_BYTES // 8)] * 5
    answer = post(gzip.compress(json.dumps({"prompt": prompt, "max_tokens": 1}).encode()), GZIP)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 5 * len(prompt[0])


def test_the_limit_is_of_the_decompressed_body_and_holds_while_it_is_decompressed() -> None:
    limit, bomb = 1 << 20, gzip.compress(bytes(200 << 20), 1)
    assert len(bomb) < limit
    tracemalloc.start()
    answer = post(bomb, GZIP, max_body_bytes=limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer.status_code == 413 and f"more than {limit} bytes" in answer.json()["error"]["message"]
    assert peak < 20 << 20
    fits = gzip.compress(PROMPT.ljust(limit))
    assert post(fits, GZIP, max_body_bytes=limit).status_code == 200
    assert post(gzip.compress(PROMPT.ljust(limit + 1)), GZIP, max_body_bytes=limit).status_code == 413


def test_members_without_content_count_as_bytes_of_the_body() -> None:
    empty = gzip.compress(b"") * 1000
    assert post(in_parts(empty, 1000), GZIP, max_body_bytes=len(empty) - 1).status_code == 413


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (PROMPT, "not gzip"),
        (gzip.compress(PROMPT)[:-5], "in the middle of its gzip data"),
        (b"", "in the middle of its gzip data"),
        (gzip.compress(PROMPT) + b"more", "not gzip"),
    ],
    ids=["no gzip", "cut", "empty", "more"],  # gzip data has the time in it
)
def test_a_damaged_gzip_body_is_refused(content: bytes, said: str) -> None:
    answer = post(content, GZIP)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["deflate", "br", "zstd", "gzip, gzip", "é"])
def test_another_encoding_is_refused_by_name(encoding: str) -> None:
    answer = post(PROMPT, JSON | {"Content-Encoding": encoding.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.status_code == 415 and "Content-Encoding" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_byte_order_mark_is_no_part_of_the_json(path: str) -> None:
    body = b'{"prompt": "x"}'
    for content, headers in ((b"\xef\xbb\xbf" + body, JSON), (gzip.compress(b"\xef\xbb\xbf" + body), GZIP)):
        assert post(content, headers, path).status_code == 200
    assert post(b"\xef\xbb\xbf\xef\xbb\xbf" + body, JSON, path).status_code == 400


def test_an_integer_may_be_written_as_a_decimal_number() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        text = (
            '{"prompt": [5.0, 6, 7e0, 80E-1], "max_tokens": 2.0, "n": 1e0, "seed": -3.00, "stop": ["8.0", "\\"9.0"], '
            '"temperature": 2.0, "top_p": 0.5, "logit_bias": {"7": 1.0}, "stop_token_ids": [1.20e1]}'
        )
        async with gateway(engines) as http:
            answer = await http.post("/v1/completions", content=text, headers=JSON)
            chat = await http.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "1.0"}], "top_logprobs": 2.0, "logprobs": True},
            )
        assert (answer.status_code, chat.status_code) == (200, 200), answer.text + chat.text
        request, other = engines.asked
        params = request.params
        assert request.prompt == [5, 6, 7, 8] and (params.max_tokens, params.n, params.seed) == (2, 1, -3)
        assert params.stop_strings == ("8.0", '"9.0') and params.stop_token_ids == (12,)
        assert (params.temperature, params.top_p, params.biases) == (2.0, 0.5, {7: 1.0})
        assert other.prompt == "<user>1.0<assistant>" and other.params.logprobs == 2

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('"top_k": 5.5', "top_k=5.5 must be an integer"),
        ('"top_k": 5.0, "seed": 0.25', "seed=0.25 must be an integer"),
        ('"n": 999.0', "n=999 must be an integer of at most"),
        ('"top_k": 1e400', "top_k cannot be used: Number out of range"),
        ('"top_k": 1.0, "n": 1e30', "n=1e+30 must be an integer"),
        ('"stream": 1.0', "stream"),
        ('"top_k": "5.0"', "top_k='5.0' must be an integer"),
    ],
)
def test_other_numbers_are_no_integers(fields: str, said: str) -> None:
    answer = post(f'{{"prompt": "x", {fields}}}', JSON)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text


def test_the_child_process_returns_the_integers_of_a_large_body() -> None:

    decoder = BodyDecoder(1 << 20)
    try:
        for prompt in ('"a\\n"', "[[5.0, 6], [7]]", "[1.0, 2]"):
            data = f'{{"prompt": {prompt},\n "top_k": 3.0}}\n'.encode()
            valid = decoder.check(data, CompletionRequest)
            body = asyncio.run(valid.decode())
            assert body.top_k == 3 and b"3.0" not in valid.data
            assert body.prompt == json.loads(prompt)
    finally:
        decoder.close()
