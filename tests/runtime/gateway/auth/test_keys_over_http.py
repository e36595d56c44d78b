"""A gateway with keys, limits and a usage log, over HTTP."""

import asyncio
import json
import random
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sidestream.runtime.api.errors import EngineDeadError
from sidestream.runtime.gateway.app import build_app
from sidestream.runtime.gateway.auth import edit_keys_file
from sidestream.runtime.gateway.auth.admission import KeyAdmission
from sidestream.runtime.gateway.auth.key_store import Key, KeyStore
from sidestream.runtime.gateway.auth.usage_log import PayloadLog, UsageLog
from sidestream.runtime.gateway.auth.usage_report import report
from sidestream.runtime.gateway.interfaces import AdapterCard, EngineRequest
from sidestream.runtime.gateway.metrics.access_log import AccessLog
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.runtime.protocol.messages import Chunk
from support.gateway import FakeEngines, events, gateway
from support.listening import listening


@dataclass
class Governed:
    """A keys file, a usage log, and the engines. `clock`: seconds of both clocks of the limits."""

    folder: Path
    engines: FakeEngines = field(default_factory=FakeEngines)
    clock: float = field(default_factory=time.time)
    secrets: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add("root", admin=True)
        self.log = UsageLog(self.folder / "usage.db")
        self.access = AccessLog(self.folder / "access.log")
        self.admission = KeyAdmission(
            KeyStore(self.folder / "keys.toml"), self.log, lambda: self.clock, lambda: self.clock
        )
        self.observer = CompositeObserver(Metrics(), [self.log, self.access, PayloadLog(self.log)])

    def add(self, name: str, **rights: Any) -> None:
        self.secrets[name] = edit_keys_file.add(self.folder / "keys.toml", Key(name, "", f"{name}-team", **rights))

    def bearer(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[name]}"}

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        async with gateway(self.engines, self.admission, self.observer) as http:
            yield http
        self.close()

    def close(self) -> None:
        self.log.close()
        self.access.close()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "usage.db")) as connection:
            return connection.execute(query).fetchall()


@pytest.fixture
def governed(tmp_path: Path) -> Governed:
    return Governed(tmp_path)


def ask(http: httpx.AsyncClient, who: dict[str, str], **body: Any) -> Any:
    return http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 4} | body, headers=who)


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "api-key"])
def test_a_key_counts_in_openai_s_anthropic_s_and_azure_s_header(governed: Governed, header: str) -> None:
    """On every path, with the rights of its owner; what watches requests never sees it."""

    async def scene() -> None:
        governed.add("sam", models=["pirate"])
        admitted: list[Any] = []
        governed.observer.on_admitted = admitted.append  # type: ignore[method-assign]

        def given(key: str) -> dict[str, str]:
            return {header: f"Bearer {key}" if header == "Authorization" else key, "x-other": "kept"}

        chat = {"messages": [{"role": "user", "content": "hi"}], "model": "pirate", "max_tokens": 2}
        paths = ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"]
        async with governed.http() as http:
            for key, status in ((governed.secrets["sam"], 200), ("wrong", 401), ("", 401)):
                who = given(key)
                answers = [await http.post(path, json=chat, headers=who) for path in paths]
                answers.append(await http.get("/v1/models", headers=who))
                answers.append(await ask(http, who, model="pirate"))
                assert {answer.status_code for answer in answers} == {status}
            who = given(governed.secrets["sam"])
            assert [each["id"] for each in (await http.get("/v1/models", headers=who)).json()["data"]] == ["pirate"]
            unload = {"lora_name": "pirate"}
            assert (await http.post("/v1/unload_lora_adapter", json=unload, headers=who)).status_code == 403
            root = given(governed.secrets["root"])
            assert (await http.post("/v1/unload_lora_adapter", json=unload, headers=root)).status_code == 200
        assert len(admitted) == 3
        for request in admitted:
            assert request.caller.owner == "sam-team" and request.headers["x-other"] == "kept"
            assert governed.secrets["sam"] not in str(request.headers)

    asyncio.run(scene())


def test_authorization_counts_before_the_other_headers(governed: Governed) -> None:
    async def scene() -> None:
        async with governed.http() as http:
            other = {"x-api-key": "of-another-server"}
            assert (await http.get("/v1/models", headers=governed.bearer("root") | other)).status_code == 200
            swapped = {"Authorization": "Bearer of-another-server", "x-api-key": governed.secrets["root"]}
            assert (await http.get("/v1/models", headers=swapped)).status_code == 401

    asyncio.run(scene())


def test_a_key_over_its_tokens_gets_429_and_others_do_not_notice(governed: Governed) -> None:
    async def scene() -> None:
        governed.add("a", tokens_per_minute=20)
        governed.add("b", tokens_per_minute=20)
        async with governed.http() as http:
            for _ in range(2):
                answer = await ask(http, governed.bearer("a"))
                assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-tokens"] == "20"
            assert answer.headers["x-ratelimit-remaining-tokens"] == "6"
            refused = await ask(http, governed.bearer("a"))
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "tokens")
            assert 1 <= int(refused.headers["retry-after"]) <= 61
            assert refused.headers["x-ratelimit-remaining-tokens"] == "6"
            assert (await ask(http, governed.bearer("b"))).status_code == 200
            governed.clock += int(refused.headers["retry-after"])
            assert (await ask(http, governed.bearer("a"))).status_code == 200
        assert len(governed.engines.asked) == 4, "what is refused does not reach an engine"

    asyncio.run(scene())


def test_tokens_of_texts_count_as_requests(governed: Governed) -> None:
    governed.add("small", requests_per_minute=3)

    async def scene() -> None:
        async with governed.http() as http:
            who = governed.bearer("small")
            first = await http.post("/tokenize", json={"prompt": "x"}, headers=who)
            assert first.status_code == 200 and first.headers["x-ratelimit-remaining-requests"] == "2"
            assert (await http.post("/detokenize", json={"tokens": [97]}, headers=who)).status_code == 200
            assert (await ask(http, who, max_tokens=2)).status_code == 200
            for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [97]})):
                refused = await http.post(path, json=body, headers=who)
                assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
            assert (await http.post("/tokenize", json={"prompt": "x"}, headers=governed.bearer("root"))).is_success

    asyncio.run(scene())


def test_a_revoked_key_fails_at_its_next_request(governed: Governed) -> None:
    async def scene() -> None:
        governed.add("a")
        async with governed.http() as http:
            assert (await ask(http, governed.bearer("a"))).status_code == 200
            edit_keys_file.revoke(governed.folder / "keys.toml", "a")
            refused = await ask(http, governed.bearer("a"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert governed.secrets["a"] not in refused.text
            assert (await http.get("/v1/models", headers=governed.bearer("a"))).status_code == 401
            assert (await ask(http, {})).status_code == 401
            assert (await http.get("/health")).status_code == 200

    asyncio.run(scene())


def test_an_adapter_outside_the_patterns_is_as_if_it_did_not_exist(governed: Governed) -> None:
    async def scene() -> None:
        governed.add("a", models=("base", "pir*"))
        async with governed.http() as http:
            hidden = await ask(http, governed.bearer("a"), model="shout")
            missing = await ask(http, governed.bearer("a"), model="shoot")
            assert hidden.status_code == missing.status_code == 404
            assert hidden.text.replace("shout", "shoot") == missing.text
            assert (await ask(http, governed.bearer("a"), model="pirate")).status_code == 200
            listed = (await http.get("/v1/models", headers=governed.bearer("a"))).json()["data"]
            assert [card["id"] for card in listed] == ["base", "pirate"]
            one = await http.get("/v1/models/shout", headers=governed.bearer("a"))
            assert one.status_code == 404
            everything = (await http.get("/v1/models", headers=governed.bearer("root"))).json()["data"]
            assert [card["id"] for card in everything] == ["base", "pirate", "shout"]

    asyncio.run(scene())


def test_admin_and_metrics_are_rights_of_their_own(governed: Governed) -> None:
    async def scene() -> None:
        governed.add("a")
        governed.add("prometheus", models=(), metrics=True)
        body = {"lora_name": "new", "lora_path": "/adapters/new"}
        async with governed.http() as http:
            for who, loads, reads, asks in (
                ("root", 200, 200, 200),
                ("a", 403, 403, 200),
                ("prometheus", 403, 200, 404),
            ):
                bearer = governed.bearer(who)
                assert (await http.post("/v1/load_lora_adapter", json=body, headers=bearer)).status_code == loads
                assert (await http.get("/metrics", headers=bearer)).status_code == reads
                assert (await ask(http, bearer)).status_code == asks
        assert [call[1] for call in governed.engines.calls] == ["new"]

    asyncio.run(scene())


def test_the_keys_own_max_tokens_cuts_an_answer(governed: Governed) -> None:
    async def scene() -> None:
        governed.add("a", max_tokens=3)
        async with governed.http() as http:
            answer = (await ask(http, governed.bearer("a"), max_tokens=9)).json()
        assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["finish_reason"] == "length"

    asyncio.run(scene())


def test_one_request_is_told_everywhere_under_its_id(governed: Governed) -> None:
    async def scene() -> None:
        async with governed.http() as http:
            headers = governed.bearer("root") | {"X-Request-Id": "my-request"}
            answer = await ask(http, headers, model="pirate", prompt="hi", stream=True)
            assert answer.headers["x-request-id"] == "my-request"
            text = "".join(event["choices"][0]["text"] for event in events(answer.text)[:-1])
            metrics = (await http.get("/metrics", headers=governed.bearer("root"))).text
        assert 'sidestream_output_tokens_total{model="pirate"} 4.0' in metrics
        assert 'sidestream_owner_tokens_total{owner="root-team"} 6.0' in metrics
        assert 'sidestream_engine_requests_total{engine="engine"} 1.0' in metrics
        ((payload,),) = governed.rows("SELECT payload FROM payloads WHERE request_id = 'my-request'")
        told = json.loads(payload)
        assert told == {"model": "pirate", "prompts": ["hi"], "answers": [{"0": text}], "truncated": False}
        query = "SELECT owner, key, model, adapter, adapter_content, prompt_tokens, output_tokens, status FROM usage"
        assert governed.rows(query) == [("root-team", "root", "base", "pirate", "aa", 2, 4, 200)]
        first = json.loads((governed.folder / "access.log").read_text().splitlines()[0])
        assert (first["request_id"], first["path"], first["owner"]) == ("my-request", "/v1/completions", "root-team")
        assert (first["adapter"], first["output_tokens"], first["status"]) == ("pirate", 4, 200)

    asyncio.run(scene())


# -- clients' counts and the log's ---------------------------------------------------------------------------------


class Troubled(FakeEngines):
    """Engines that answer as a request's seed says: whole, stuck after some tokens, dead before or while answering."""

    def __init__(self) -> None:
        super().__init__()
        self.cards = [AdapterCard(f"a{index}", 8, f"{index:032x}") for index in range(4)]

    async def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        fate, after = divmod(request.params.seed or 0, 100)
        if fate == 1:
            raise EngineDeadError("it died", "engine_dead", 1.0)
        told = 0
        inner = super().stream(request)
        try:
            async for chunks in inner:
                if told == after and fate == 2:
                    raise EngineDeadError("it died", "engine_dead", 1.0)
                if told == after and fate == 3:
                    await asyncio.Event().wait()  # until the client leaves
                yield chunks
                told += 1
        finally:
            await inner.aclose()


async def one_client(http: httpx.AsyncClient, who: dict[str, str], draw: random.Random, counts: Counter[Any]) -> None:
    """One request; adds what the client saw of it: requests, tokens of the prompt and of the answer, by adapter."""
    fate = draw.choices([0, 1, 2, 3], [6, 1, 2, 3])[0]
    most, prompt = draw.randint(1, 12), [7] * draw.randint(1, 50)
    after = draw.randint(1, most) if fate == 3 else draw.randint(0, most - 1)
    fate = 0 if fate == 3 and after == most else fate
    adapter = draw.choice(["base", *(f"a{index}" for index in range(4))])
    stream = fate == 3 or draw.random() < 0.5
    body = {"model": adapter, "prompt": prompt, "max_tokens": most, "seed": 100 * fate + after, "stream": stream}
    seen = 0
    async with http.stream("POST", "/v1/completions", json=body, headers=who) as answer:
        if not stream or answer.status_code != 200:
            await answer.aread()
            if answer.status_code == 200:
                seen = answer.json()["usage"]["completion_tokens"]
            else:
                assert answer.status_code == 503
                seen = after if fate == 2 else 0  # an engine that dies takes with it what it had sent
        else:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    seen += len(event["choices"][0]["text"]) // 2 if "choices" in event else 0
                if fate == 3 and seen == after:
                    break  # the client goes away
    counts[adapter, "requests"] += 1
    counts[adapter, "prompt"] += len(prompt) if fate != 1 else 0
    counts[adapter, "output"] += seen
    counts[adapter, "failed"] += fate != 0


def test_the_logs_sums_are_the_clients_own(governed: Governed, pytestconfig: pytest.Config) -> None:
    """Answers whole and streamed, engines that die before and while they answer, clients that go away."""
    many = 10_000 if pytestconfig.getoption("--exhaustive") else 300
    draw, counts = random.Random(7), Counter[Any]()

    async def scene() -> None:
        app = build_app(Troubled(), governed.admission, governed.observer, GatewaySettings())
        async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:

            async def client(number: int) -> None:
                for _ in range(number, many, 32):
                    await one_client(http, governed.bearer("root"), draw, counts)

            async with asyncio.TaskGroup() as group:
                for number in range(32):
                    group.create_task(client(number))
        governed.close()

    asyncio.run(scene())
    found = report(governed.folder / "usage.db", ["model", "adapter"])
    assert sum(counts[key] for key in counts if key[1] == "requests") == many
    for model, adapter, content, requests, failed, prompt, _, output, *_ in found.rows:
        name = adapter or model
        assert content == ("" if adapter is None else f"{int(str(adapter)[1:]):032x}")
        asked = {what: counts[name, what] for what in ("requests", "failed", "prompt", "output")}
        assert asked == {"requests": requests, "failed": failed, "prompt": prompt, "output": output}
    assert len(found.rows) == 5 and governed.log.dropped == 0
    ((gone,),) = governed.rows("SELECT count(*) FROM usage WHERE status = 499")
    assert gone > many / 8, "clients did go away"
