"""aLoRA over HTTP with two engines: requests go where the base has computed their prompt, and usage tells of misses."""

import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.fake_runner import continuation
from support.serving import serve_fake

INVOCATION = [1, 2, 3]
VOCABULARY = 251
SECONDS = 120.0


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("alora")
    (folder / "a0").mkdir()
    (folder / "a0" / "invocation").write_text(json.dumps(INVOCATION))
    sizes = {"num_pages": 600, "max_model_len": 4096, "max_num_batched_tokens": 1024, "step_seconds": 0.001}
    sizes["max_num_seqs"] = 128  # a report that counts requests which have ended meanwhile makes little difference
    with serve_fake(folder, adapters=2, engines=2, http=True, **sizes) as server:
        yield _port_when_both_are_ready(server.log)


def _port_when_both_are_ready(log: Path) -> int:
    limit = time.monotonic() + SECONDS
    while True:
        found = [word for word in log.read_text().split() if word.startswith("http://127.0.0.1:")]
        if found:
            port = int(found[0].rstrip("/").rpartition(":")[2])
            if list(ask(port, "/health").get("engines", {}).values()) == ["ok", "ok"]:
                return port
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.05)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    headers = {"Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def complete(port: int, model: str, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answer = ask(port, "/v1/completions", body)
    return answer["choices"][0]["token_ids"], answer["usage"]


def text(source: random.Random, length: int) -> list[int]:
    return [source.randrange(10, VOCABULARY) for _ in range(length)]


def test_requests_go_to_the_engine_with_the_base_s_pages(port: int) -> None:
    """The adapter is on one engine's GPU only, and the base's prompts are spread over both."""
    source = random.Random(3)
    complete(port, "a0", text(source, 5) + INVOCATION)
    contexts = [text(source, 64 * 34) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:  # at once: the router spreads them
        list(pool.map(lambda context: complete(port, "fake", context), contexts))
    for context in contexts:
        for start in (64 * 33 + 10, 64 * 34):
            prompt = context[:start] + INVOCATION + text(source, 20)
            found, usage = complete(port, "a0", prompt)
            assert found == continuation(prompt, 0, 4, VOCABULARY, start)
            assert usage["prompt_tokens_details"]["cached_tokens"] == start // 64 * 64
            assert "adapter_active" not in usage


def test_usage_tells_that_the_invocation_is_absent(port: int) -> None:
    prompt = text(random.Random(4), 70)
    found, usage = complete(port, "a0", prompt)
    assert found == complete(port, "fake", prompt)[0] and usage["adapter_active"] is False
    assert "adapter_active" not in complete(port, "a1", prompt)[1], "plain LoRA"
    several = ask(port, "/v1/completions", {"model": "a0", "prompt": [prompt, INVOCATION], "max_tokens": 1})
    assert several["usage"]["adapter_active"] is False
