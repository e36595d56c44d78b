"""Streams that wait: their head and comments keep proxies from closing them; errors keep their status until then."""

import argparse
import asyncio
import http.client
import json
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import httpx
import pytest
from sidestream.runtime.api.errors import EngineDeadError, RequestError, ServerError
from sidestream.runtime.gateway.api import event_stream
from sidestream.runtime.gateway.api.event_stream import DONE, EventStream
from sidestream.runtime.gateway.app import build_app
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.runtime.protocol.messages import Chunk
from sidestream.tools.options.gateway import add_gateway_options, gateway_settings
from support.gateway import FakeEngines, events, listening
from support.serving import GUARD

COMMENT = ": waiting\n\n"
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "tell", "max_tokens": 3}),
    "prompts": ("/v1/completions", {"prompt": ["one", "two"], "n": 2, "max_tokens": 2}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 3}),
    "responses": ("/v1/responses", {"input": "tell", "max_output_tokens": 3}),
}


class Queued(FakeEngines):
    """Accepts a request at once if `accepts`. Answers it after `wait` seconds, and when the client has got so many
    `comments`; `later`: so many more before token 2.
    """

    def __init__(self, accepts: bool = True, wait: float = 0.0, comments: int = 0, later: int = 0) -> None:
        super().__init__()
        self.accepts, self.wait, self.comments, self.later = accepts, wait, comments, later
        self.sent = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    async def stream(self, request: EngineRequest) -> AsyncGenerator[list[Chunk], None]:
        self.loop = asyncio.get_running_loop()
        if self.accepts and request.when_accepted is not None:
            request.when_accepted(len(request.prompt), "")
        await asyncio.sleep(self.wait)
        await self._commented(self.comments)
        number = 0
        async for chunks in super().stream(request):
            number += 1
            if number == 2:
                await self._commented(self.sent + self.later)
            yield chunks

    async def _commented(self, count: int) -> None:
        async with asyncio.timeout(GUARD):
            while self.sent < count:
                await asyncio.sleep(0.01)


def streamed(engines: Queued, path: str, body: dict[str, Any], keepalive: float) -> tuple[int, str]:
    """The status and the body of a stream."""
    settings = GatewaySettings(stream_keepalive_seconds=keepalive)
    app = build_app(engines, NoAuth(), CompositeObserver(Metrics()), settings)

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            engines.sent += message.get("body", b"").count(COMMENT.encode())
            await send(message)

        await app(scope, receive, counted)

    async def scene() -> tuple[int, str]:
        transport = httpx.ASGITransport(app=counting)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post(path, json=body | {"stream": True}, timeout=60)
            return answer.status_code, answer.text

    return asyncio.run(scene())


@pytest.mark.parametrize("name", REQUESTS)
def test_comments_come_before_the_events_and_change_none_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = REQUESTS[name]
    status, text = streamed(Queued(comments=3), path, body, 0.2)
    assert status == 200 and text.startswith(COMMENT * 3)
    monkeypatch.setattr(event_stream, "HEAD_SECONDS", 600.0)  # longer than a busy machine takes for the first token
    _, silent = streamed(Queued(), path, body, 600.0)
    assert COMMENT not in silent, "a stream that does not wait has no comment"
    kinds = [[event if event == "[DONE]" else event.get("type") or event["object"] for event in events(each)]
             for each in (text, silent)]  # fmt: skip
    assert kinds[0] == kinds[1] and len(kinds[0]) > 3


def test_the_head_and_a_comment_arrive_while_the_request_waits() -> None:
    engines = Queued()
    engines.gate.clear()
    with listening(engines) as place:
        connection = http.client.HTTPConnection(*place, timeout=60)
        body = json.dumps({"prompt": "tell", "max_tokens": 2, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.readline() == b": waiting\n"
        assert not engines.gate.is_set() and engines.loop is not None
        engines.loop.call_soon_threadsafe(engines.gate.set)
        assert answer.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("problem", "status"),
    [(RequestError("the prompt is too long"), 400), (ServerError("no adapter 'x'", "unknown_adapter"), 404)],
)
def test_an_error_before_the_engine_accepts_keeps_its_status(problem: Exception, status: int) -> None:
    engines = Queued(accepts=False, wait=0.7)
    engines.problem = lambda request: problem
    path, body = REQUESTS["chat"]
    found, text = streamed(engines, path, body, 600)
    assert found == status and json.loads(text)["error"]


def test_an_engine_that_never_accepts_is_waited_for_with_comments_too() -> None:
    status, text = streamed(Queued(accepts=False, comments=2), *REQUESTS["completion"], 0.3)
    assert status == 200 and text.startswith(COMMENT * 2)


def test_an_error_after_the_head_is_an_event() -> None:
    engines = Queued(comments=1)
    engines.problem = lambda request: EngineDeadError("gone", "engine_dead")
    status, text = streamed(engines, *REQUESTS["completion"], 30)
    assert status == 200 and text.startswith(COMMENT)
    (event,) = events(text)
    assert event["error"]["code"] == "engine_dead"


def test_zero_switches_it_off() -> None:
    engines = Queued(wait=0.7)
    engines.problem = lambda request: EngineDeadError("gone", "engine_dead")
    status, text = streamed(engines, *REQUESTS["completion"], 0)
    assert status == 503 and COMMENT not in text


def test_the_flag_sets_the_interval() -> None:
    parser = argparse.ArgumentParser()
    add_gateway_options(parser, ["--keys"])
    for flags, seconds in (([], 10.0), (["--stream-keepalive-seconds", "2.5"], 2.5)):
        options = argparse.Namespace(**vars(parser.parse_args(["--usage-log", "none", *flags])), drain_seconds=1.0)
        assert gateway_settings(options).stream_keepalive_seconds == seconds
    with pytest.raises(SystemExit):
        parser.parse_args(["--stream-keepalive-seconds", "-1"])


def test_a_stream_that_pauses_between_tokens_gets_comments() -> None:
    _, text = streamed(Queued(later=1), *REQUESTS["completion"], 0.2)
    assert text.index('"text":"a "') < text.rindex(COMMENT) < text.index('"text":"b "')
    assert text.endswith(DONE.decode())


def test_an_endpoint_may_send_an_event_instead_of_the_comment() -> None:
    class Session:
        headers: ClassVar[dict[str, str]] = {}
        keepalive_seconds, accepted, complete = 0.1, True, False

        async def stream(self, direct: Any) -> AsyncGenerator[Any, None]:
            while sent.count(b"ping") < 2:
                await asyncio.sleep(0.01)
            self.complete = True
            yield 0, []

        async def close(self) -> None: ...

    class Formatter:
        counts = None

        def format(self, prompt_index: int, chunks: Any) -> list[bytes]:
            return [b"data: end\n\n"]

        def format_end(self, counts: Any) -> list[bytes]:
            return []

    sent = bytearray()

    async def scene() -> None:
        session: Any = Session()
        session.counts = None

        async def send(message: Any) -> None:
            sent.extend(message.get("body", b""))

        async def receive() -> Any:
            await asyncio.sleep(60)

        stream = EventStream(session, Formatter(), b"event: ping\n\n")  # type: ignore[arg-type]
        await stream({"type": "http"}, receive, send)

    asyncio.run(asyncio.wait_for(scene(), GUARD))
    assert sent.startswith(b"event: ping\n\n" * 2) and sent.endswith(b"data: end\n\n") and b": waiting" not in sent
