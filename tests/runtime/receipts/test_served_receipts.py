"""Receipts of a server, over ZeroMQ and HTTP: they are answered again, and name neither texts nor files."""

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import json as fast_json
from msgspec import structs
from sidestream.runtime.llm import LLM
from sidestream.runtime.protocol.messages import Sampling
from sidestream.runtime.receipts.base_hash import base_hash
from sidestream.runtime.receipts.receipt import Receipt, is_signed_by, parse_receipt
from sidestream.runtime.server.settings import ServeSettings
from sidestream.tools.commands.replay import SAME, answer_again
from support.serving import GUARD, Server, serve, serve_fake
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

KEY = "0123456789abcdef0123456789abcdef"
OPTIONS = {"device": "cpu", "precision": "fp32", "max_model_len": 256}
PROMPT = "the quick brown fox"
WANTED = Sampling(temperature=1.0, max_tokens=9, logprobs=0, receipt=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("secret-folder"), tokenizer=True, num_hidden_layers=1)


@pytest.fixture(scope="module")
def adapter(base: TinyBase) -> str:
    return str(tiny_adapters(base, [AdapterSpec(rank=4, alpha=32)])[0])


@pytest.fixture(scope="module")
def server(base: TinyBase, adapter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    settings = ServeSettings(
        model=str(base.path),
        llm=OPTIONS,
        adapters={"tenant-a": adapter},
        receipt_key=str(key),
        chat_template="{{ messages[0].content }}",
        served_model_name="tiny",
    )
    with serve(settings, folder / "server.log", http=True) as server:
        yield server


@pytest.fixture(scope="module")
def llm(base: TinyBase, adapter: str) -> Iterator[LLM]:
    with LLM(base.path, adapters={"other-name": adapter}, show_progress=False, **OPTIONS) as llm:  # type: ignore[arg-type]
        yield llm


def check(receipt: dict[str, Any], llm: LLM) -> Receipt:
    """Check a receipt of an answer to PROMPT."""
    text = json.dumps(receipt)
    assert not any(hidden in text for hidden in (PROMPT, "secret-folder", "tenant-a", "tiny"))
    found = parse_receipt(text.encode())
    assert is_signed_by(found, KEY.encode()) and llm.tokenizer is not None
    findings = answer_again(found, llm, llm.tokenizer.encode(PROMPT, True))
    assert {state for _, state, _ in findings} == {SAME}, findings
    return found


def ask(server: Server, path: str, body: dict[str, Any]) -> bytes:
    """Post to the HTTP front; wait until it serves."""
    limit = time.monotonic() + GUARD
    while True:
        found = [word for word in server.log.read_text().split() if word.startswith("http://127.0.0.1:")]
        assert time.monotonic() < limit, server.log.read_text()
        if found:
            connection = http.client.HTTPConnection("127.0.0.1", int(found[0].rstrip("/").rpartition(":")[2]))
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 503:  # no engine yet
                assert response.status == 200, answer
                return answer
        time.sleep(0.05)


def events(answer: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream without [DONE]."""
    return [json.loads(line[6:]) for line in answer.decode().splitlines() if line[:6] == "data: " and line[6:7] == "{"]


def test_over_zeromq(server: Server, base: TinyBase, llm: LLM) -> None:
    with server.connect() as wire:
        for name, stream, many in (("whole", False, 2), ("streamed", True, 2), ("none", True, 1)):
            sampling = structs.replace(WANTED, n=many, receipt=name != "none")
            wire.submit(name, sampling, prompt=PROMPT, adapter="tenant-a", stream=stream)
            chunks = wire.answer(name).chunks
            assert all(chunk.receipt is None for chunk in chunks[:-1])
            if name == "none":
                assert chunks[-1].receipt is None
                continue
            found = check(chunks[-1].receipt or {}, llm)
            assert found.base == base_hash(base.path) and len(found.outputs) == 2 and found.cached_tokens == 0


def test_over_http(server: Server, llm: LLM) -> None:
    body = {"model": "tenant-a", "max_tokens": 9, "seed": 5, "receipt": True}
    completion = json.loads(ask(server, "/v1/completions", body | {"prompt": PROMPT}))
    first = check(completion["sidestream_receipt"], llm)
    several = json.loads(ask(server, "/v1/completions", body | {"prompt": [PROMPT, PROMPT]}))
    assert [check(each, llm).outputs for each in several["sidestream_receipt"]] == [first.outputs] * 2
    chat = body | {"messages": [{"role": "user", "content": PROMPT}], "add_special_tokens": True}
    assert check(json.loads(ask(server, "/v1/chat/completions", chat))["sidestream_receipt"], llm).outputs
    for path, asked in (("/v1/completions", body | {"prompt": PROMPT}), ("/v1/chat/completions", chat)):
        for options in ({}, {"include_usage": True, "continuous_usage_stats": True}):
            got = events(ask(server, path, asked | {"stream": True, "stream_options": options}))
            with_choices = [event for event in got if event["choices"]]
            assert check(with_choices[-1]["sidestream_receipt"], llm).outputs == first.outputs
            assert sum("sidestream_receipt" in event for event in got) == 1
    plain = ask(server, "/v1/completions", body | {"prompt": PROMPT, "receipt": False})
    assert b"receipt" not in plain


def test_all_answers_get_one_or_nobody_without_a_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    (tmp_path / "all").mkdir()
    (tmp_path / "none").mkdir()
    with serve_fake(tmp_path / "all", receipt_key=str(key), receipts=True) as server, server.connect() as wire:
        wire.submit("a", prompt_token_ids=[1, 2, 3])
        found = parse_receipt(fast_json.encode(wire.answer("a").chunks[-1].receipt))
        assert is_signed_by(found, KEY.encode()) and found.base == found.numerics == ""
    with serve_fake(tmp_path / "none") as server, server.connect() as wire:
        wire.submit("a", structs.replace(WANTED, max_tokens=2), prompt_token_ids=[1, 2, 3])
        error = wire.answer("a").error
        assert error is not None and error.code == "invalid_request" and "--receipt-key FILE" in error.message
        wire.submit("b", Sampling(max_tokens=2), prompt_token_ids=[1, 2, 3])
        assert wire.answer("b").chunks[-1].receipt is None
