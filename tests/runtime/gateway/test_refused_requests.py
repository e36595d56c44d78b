"""What a refused request costs: nothing is read, decoded, rendered or tokenized for it, and its owner waits alone."""

import asyncio
import errno
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway import connections
from sidestream.runtime.gateway.api import request_body
from sidestream.runtime.gateway.api.context import CLOSED, GatewayContext
from sidestream.runtime.gateway.app import build_app
from sidestream.runtime.gateway.auth import edit_keys_file
from sidestream.runtime.gateway.auth.admission import KeyAdmission, NoAuth
from sidestream.runtime.gateway.auth.key_store import Key, KeyStore
from sidestream.runtime.gateway.intake import refusal_pace
from sidestream.runtime.gateway.intake.fair_queue import FairQueue
from sidestream.runtime.gateway.metrics.history import INTERVAL_SECONDS
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.runtime.text.chat_renderer import ChatRenderer
from support.gateway import FakeEngines, gateway, listening
from support.written import Closable, connector

HELLO = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": ["hello", "you"], "max_tokens": 1, "echo": True, "logprobs": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/tokenize": {"messages": HELLO},
    "/detokenize": {"tokens": [97]},
}


class Counting(FakeEngines):
    """Engines that count the calls of their tokenizer."""

    def __init__(self, work: Counter[str]) -> None:
        super().__init__()
        self.work = work

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.work["tokenized"] += 1
        return await super().tokenize(text, add_special_tokens)

    async def detokenize(self, token_ids: list[int]) -> str:
        self.work["detokenized"] += 1
        return await super().detokenize(token_ids)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts bodies that are read and templates that are rendered."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def call(*values: Any, **named: Any) -> Any:
            counts[what] += 1
            return function(*values, **named)

        monkeypatch.setattr(owner, name, call)

    counted(request_body, "_read", "read")
    counted(ChatRenderer, "prompts", "rendered")
    return counts


class Keys:
    """A keys file. `bearer` makes a key and returns its header."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.toml"
        self.bearer("root")
        self.admission = KeyAdmission(KeyStore(self.path))

    def bearer(self, name: str, **rights: Any) -> dict[str, str]:
        return {"Authorization": f"Bearer {edit_keys_file.add(self.path, Key(name, '', name, **rights))}"}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.mark.parametrize("path", BODIES)
def test_nothing_is_done_for_a_key_without_requests_left(path: str, keys: Keys, work: Counter[str]) -> None:
    async def run() -> None:
        async with gateway(Counting(work), keys.admission) as http:
            poor, unknown = keys.bearer("poor", requests_per_minute=1), {"Authorization": "Bearer nobody"}
            assert (await http.post(path, json=BODIES[path], headers=poor)).status_code == 200
            before = Counter(work)
            assert before["read"] == 1
            for who, status, code in ((poor, 429, "rate_limit_exceeded"), (unknown, 401, "invalid_api_key")):
                for body in (BODIES[path], {"model": "other"}, {"nonsense": 1}):
                    refused = await http.post(path, json=body, headers=who)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
            assert work == before

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_nothing_is_rendered_or_tokenized_for_a_key_without_tokens(path: str, keys: Keys, work: Counter[str]) -> None:
    long = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello " * 100}]},
        "/v1/completions": {"prompt": "hello " * 100},
        "/v1/responses": {"input": "hello " * 100},
    }[path]

    async def run() -> None:
        async with gateway(Counting(work), keys.admission) as http:
            poor = keys.bearer("poor", tokens_per_minute=60)
            refused = await http.post(path, json=BODIES[path] | long, headers=poor)
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
            missing = await http.post(path, json=BODIES[path] | {"model": "missing"}, headers=poor)
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
            assert work == {"read": 2}
            assert (await http.post(path, json=BODIES[path], headers=poor)).status_code == 200, "it had tokens left"
            assert (await http.post("/tokenize", json={"prompt": "x"}, headers=poor)).status_code == 200

    asyncio.run(run())


def test_a_chat_that_cannot_be_rendered_returns_its_tokens(keys: Keys) -> None:
    async def run() -> None:
        async with gateway(FakeEngines(), keys.admission) as http:
            poor, body = keys.bearer("poor", tokens_per_minute=30), {"messages": HELLO, "max_tokens": 16}
            for _ in range(3):
                wrong = await http.post(
                    "/v1/chat/completions", json=body | {"chat_template_kwargs": {"tools": 1}}, headers=poor
                )
                assert wrong.status_code == 400
            assert (await http.post("/v1/chat/completions", json=body, headers=poor)).status_code == 200

    asyncio.run(run())


def test_refusals_of_one_key_are_spaced(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_pace, "PER_SECOND", 0.001)  # however long the requests take
    slept, sleep = list[float](), asyncio.sleep

    async def recorded(seconds: float) -> None:
        if seconds == INTERVAL_SECONDS:  # between two samples of the console's history
            await sleep(seconds)
        slept.append(seconds)
        await sleep(0)

    async def run() -> None:
        async with gateway(FakeEngines(), keys.admission) as http:
            poor, other = keys.bearer("poor", requests_per_minute=1), keys.bearer("other", requests_per_minute=1)
            monkeypatch.setattr("sidestream.runtime.gateway.middleware.asyncio.sleep", recorded)
            for _ in range(100):
                await http.post("/detokenize", json={"tokens": [97]}, headers=poor)
            assert len(slept) == 100 - 1 - refusal_pace.BURST and 0 < max(slept) < 1.001
            slept.clear()
            for _ in range(2):
                answer = await http.post("/detokenize", json={"tokens": [97]}, headers=other)
            assert answer.status_code == 429 and not slept

    asyncio.run(run())


def test_refusals_without_keys_are_spaced_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_pace, "PER_SECOND", 0.001)  # however long the requests take
    slept, sleep = list[float](), asyncio.sleep

    async def recorded(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async def run() -> None:
        app = build_app(FakeEngines(), NoAuth(), CompositeObserver(Metrics()), GatewaySettings())
        one, other = (
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app, client=(host, 1)), base_url="http://localhost")
            for host in ("192.0.2.1", "192.0.2.2")
        )
        monkeypatch.setattr("sidestream.runtime.gateway.middleware.asyncio.sleep", recorded)
        async with one, other:
            for headers in ({}, {"Host": "evil.example"}):
                for _ in range(20):
                    await one.get("/v1/models/missing", headers=headers)
                assert slept
                slept.clear()
                assert (await other.get("/v1/models/missing")).status_code == 404 and not slept

    asyncio.run(run())


def test_only_an_unread_large_body_ends_its_connection(keys: Keys) -> None:
    text, who = "x" * 100_000, keys.bearer("one")
    missing = {"prompt": text, "model": "missing"}

    async def run() -> None:
        async with gateway(FakeEngines(), keys.admission) as http:
            for body, headers, status, ends in (
                (missing, who, 404, False),
                ({"prompt": text, "n": "x"}, who, 400, False),
                (missing, {}, 401, True),
                ({"prompt": "x"}, {}, 401, False),
                (missing, {"Content-Length": "200000".zfill(40)}, 401, True),
                (missing, who | {"Content-Type": "text/plain"}, 415, True),
            ):
                content = json.dumps(body).encode()
                answer = await http.post("/v1/completions", content=content, headers=JSON | headers)
                assert answer.status_code == status
                assert answer.headers.get("connection") == ("close" if ends else None), (status, headers)

    asyncio.run(run())


# -- connections ---------------------------------------------------------------------------------------------------


def head(who: dict[str, str], length: int) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in who.items())
    lines += f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode()


def answer_of(peer: socket.socket) -> tuple[bytes, dict[str, str], bytes]:
    """Status line, headers and body."""
    with peer.makefile("rb") as file:
        status = file.readline()
        fields = dict(line.decode().lower().strip().split(": ", 1) for line in iter(file.readline, b"\r\n"))
        return status, fields, file.read(int(fields["content-length"]))


def test_a_connection_survives_a_refused_small_body_and_a_large_one_ends_it(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "DISCARD_SECONDS", 0.0)
    monkeypatch.setattr(connections, "LINGER_SECONDS", 600.0)
    nobody = {"Authorization": "Bearer nobody"}
    with listening(FakeEngines(), keys.admission) as place:
        with socket.create_connection(place, timeout=60) as peer:
            for _ in range(3):
                peer.sendall(head(nobody, 50_000) + b" " * 50_000)
                assert answer_of(peer)[0].startswith(b"HTTP/1.1 401")
        with socket.create_connection(place, timeout=60) as peer:
            peer.sendall(head(nobody, 8_000_000))
            status, fields, _ = answer_of(peer)
            assert status.startswith(b"HTTP/1.1 401") and fields["connection"] == "close", "before the body is sent"
            peer.sendall(b" " * 8_000_000)  # a client that sends all of it first gets the answer too
            assert peer.recv(1) == b"", "and no reset"
        with socket.create_connection(place, timeout=60) as peer:
            peer.sendall(head(nobody, 8_000_000) + b" " * 8_000_000)
            status, _, body = answer_of(peer)
            assert status.startswith(b"HTTP/1.1 401") and json.loads(body)["error"]["code"] == "invalid_api_key"


def test_a_refused_client_that_resets_its_connection_is_no_error_of_the_gateway(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_eof(transport: Closable) -> None:
        raise OSError(errno.ENOTCONN, "not connected")

    monkeypatch.setattr(Closable, "write_eof", write_eof)

    async def run() -> None:
        protocol, transport = connector(FakeEngines(), allowed_hosts=[])()
        protocol.data_received(head({}, 8_000_000).replace(b"localhost", b"evil.example"))
        async with asyncio.timeout(60):
            while not transport.writes:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert transport.writes[0].startswith(b"HTTP/1.1 421") and not caplog.text
        protocol.connection_lost(None)

    asyncio.run(run())


def test_an_owner_fills_its_own_share_of_memory_only(keys: Keys) -> None:
    one, other = keys.bearer("one"), keys.bearer("other")
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    with listening(FakeEngines(), keys.admission, max_body_bytes=1000) as place:
        url = f"http://{place[0]}:{place[1]}/v1/completions"
        peers = [socket.create_connection(place, timeout=60) for _ in range(4)]
        for peer in peers:
            peer.sendall(head(one, 1000) + b"{")
        until = time.monotonic() + 60
        while (refused := httpx.post(url, content=body, headers=one | JSON, timeout=60)).status_code == 200:
            assert time.monotonic() < until, "the four bodies count as soon as their headers are read"
        assert refused.json()["error"]["code"] == "too_many_body_bytes" and refused.headers["retry-after"] == "1"
        assert httpx.post(url, content=body, headers=other | JSON, timeout=60).status_code == 200
        for peer in peers:
            peer.close()
        while httpx.post(url, content=body, headers=one | JSON, timeout=60).status_code != 200:
            assert time.monotonic() < until, "they are free again"


# -- templates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 2), (4, 4), (64, 4)])
def test_there_is_a_template_process_for_each_core_up_to_four(
    cores: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    context = GatewayContext(FakeEngines(), NoAuth(), CompositeObserver(Metrics()), GatewaySettings())
    assert len(context._renderer.processes) == processes


class Renderings:
    """Replaces rendering: each one waits until `release` is called. `queued`: owners that waited for a turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        monkeypatch.setattr(ChatRenderer, "prompts", self.render)
        start = FairQueue.start

        async def counted(queue: FairQueue, owner: str) -> None:
            self.queued.append(owner)
            await start(queue, owner)

        monkeypatch.setattr(FairQueue, "start", counted)
        self.queued: list[str] = []
        self.texts: list[str] = []
        self._released = threading.Semaphore(0)
        self.release: Callable[[int], None] = self._released.release

    def render(self, templates: Any, messages: list[dict[str, Any]], **options: Any) -> list[str]:
        self.texts.append(messages[0]["content"])
        assert self._released.acquire(timeout=60)
        return [messages[0]["content"]]

    async def begun(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.texts) < count:
                await asyncio.sleep(0.001)

    async def waiting(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.queued) < count:
                await asyncio.sleep(0.001)


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


def test_owners_take_turns_with_their_chats(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    renderings = Renderings(monkeypatch)

    async def run() -> None:
        busy, other = keys.bearer("busy"), keys.bearer("other")
        async with gateway(FakeEngines(), keys.admission) as http, asyncio.TaskGroup() as group:

            def send(text: str, who: dict[str, str]) -> None:
                group.create_task(http.post("/v1/chat/completions", json=chat(text), headers=who))

            for index in range(6):
                send(f"busy {index}", busy)
            await renderings.begun(1)
            await renderings.waiting(5)
            send("other", other)
            await renderings.waiting(6)
            renderings.release(7)
        assert len(renderings.texts) == 7 and renderings.texts.index("other") <= 2, renderings.texts

    asyncio.run(run())


def test_the_chat_of_a_client_that_left_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    renderings, engines = Renderings(monkeypatch), FakeEngines()

    def send(peer: socket.socket, text: str) -> None:
        body = json.dumps(chat(text)).encode()
        peer.sendall(head({}, len(body)).replace(b"/v1/completions", b"/v1/chat/completions") + body)

    with listening(engines) as place, socket.create_connection(place, timeout=60) as first:
        send(first, "first")
        asyncio.run(renderings.begun(1))
        with socket.create_connection(place, timeout=60) as left:
            send(left, "left")
            asyncio.run(renderings.waiting(1))
        metrics, until = "", time.monotonic() + 60
        while 'status="499"' not in metrics and time.monotonic() < until:
            metrics = httpx.get(f"http://{place[0]}:{place[1]}/metrics", timeout=60).text
        with socket.create_connection(place, timeout=60) as last:
            send(last, "last")
            renderings.release(3)
            assert answer_of(first)[0].startswith(b"HTTP/1.1 200") and answer_of(last)[0].startswith(b"HTTP/1.1 200")
    assert renderings.texts == ["first", "last"] and len(engines.asked) == 2


def test_a_chat_is_not_rendered_if_its_connection_closed_while_it_was_read(work: Counter[str]) -> None:
    app = build_app(FakeEngines(), NoAuth(), CompositeObserver(Metrics()), GatewaySettings())
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), CLOSED: lambda: True,
    }  # fmt: skip
    messages: list[Any] = [{"type": "http.request", "body": json.dumps(chat("x")).encode(), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert work == {"read": 1} and sent[0]["status"] == 499


def test_what_arrives_after_a_refusal_is_discarded_without_being_delivered():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            server.setblocking(False)
            client.setblocking(False)
            sent, piece = 0, bytes(1 << 16)
            while sent < 16 << 20:  # more than the buffers of both sides
                try:
                    sent += client.send(piece)
                except BlockingIOError:
                    assert connections._discard(server.fileno())
            client.setblocking(True)
            client.sendall(b"end")
            client.shutdown(socket.SHUT_WR)
            while connections._discard(server.fileno()):
                time.sleep(0.001)
            assert server.recv(1) == b"" and not any(connections._DISCARDED)
