"""Direct writes of chunks from the middle of a stream give the same response as the task of the stream."""

import asyncio
import re
from typing import Any

import pytest
from sidestream.runtime.api.errors import EngineDeadError
from sidestream.runtime.gateway.connections import WRITE_SECONDS
from sidestream.runtime.gateway.interfaces import AdmittedRequest, HttpExchange, UsageRecord
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import BaseObserver, CompositeObserver
from sidestream.runtime.protocol.messages import Chunk
from support.gateway import Books, FakeEngines
from support.written import Written, asked

CHAT = {"messages": [{"role": "user", "content": "x"}]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "x"}),
    "logprobs": ("/v1/completions", {"prompt": "x", "logprobs": 2}),
    "n": ("/v1/completions", {"prompt": "x", "n": 2, "stream_options": {"include_usage": True}}),
    "prompts": ("/v1/completions", {"prompt": ["x", "y"]}),
    "echo": ("/v1/completions", {"prompt": "x", "echo": True}),
    "chat": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    "usage": ("/v1/completions", {"prompt": "x", "n": 3, "stream_options": {"continuous_usage_stats": True}}),
    "responses": ("/v1/responses", {"input": "x", "max_output_tokens": 6}),
}


class Watched(BaseObserver):
    """What an observer is told of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.bytes, self.status = 0, 0

    def on_chunks(self, exchange: AdmittedRequest, place: int, chunks: list[Chunk], seconds: float) -> None:
        assert seconds >= 0
        self.tokens += [token for chunk in chunks for token in chunk.token_ids]

    def on_http_exchange(self, answer: HttpExchange) -> None:
        self.bytes, self.status = answer.body_bytes, answer.status


def told(
    path: str, body: dict[str, Any], direct: bool, engines: FakeEngines | None = None
) -> tuple[str, UsageRecord, Watched, int]:
    """A stream's body without what differs each time, its usage record, what the observer saw, the chunks taken."""
    engines = engines or FakeEngines()
    engines.direct = direct
    books, watched = Books(), Watched()
    asked_for = {"stream": True, "max_tokens": 6} if "input" not in body else {"stream": True}
    transport, _ = asyncio.run(asked(path, body | asked_for, engines, books, CompositeObserver(Metrics(), [watched])))
    (record,) = books.records
    assert watched.bytes == len(transport.body.encode()), "the access log counts all that is sent"
    text = re.sub(r'-[0-9a-f]{32}"|"created":\d+|"created_at":\d+|resp_\w+|msg_\w+', "", transport.body)
    return re.sub(r'"(resp|msg)-\w+', "", text), record, watched, engines.taken


@pytest.mark.parametrize("name", REQUESTS)
def test_a_client_gets_the_same_by_either_way(name: str) -> None:
    path, body = REQUESTS[name]
    text, record, watched, taken = told(path, body, True)
    by_task, its_record, its_watched, none = told(path, body, False)
    if name == "prompts":  # several streams are merged, which needs their tasks
        assert taken == 0 and sorted(text) == sorted(by_task)
    else:
        assert taken == 4 * body.get("n", 1) and text == by_task
    assert none == 0
    assert record.output_tokens == its_record.output_tokens and record.status == its_record.status == 200
    assert sorted(watched.tokens) == sorted(its_watched.tokens) and len(watched.tokens) == record.output_tokens


def test_an_error_after_it_ends_the_stream_as_ever() -> None:
    for direct in (True, False):
        engines = FakeEngines()
        engines.late = EngineDeadError("gone", "engine_dead")
        text, record, _, taken = told("/v1/completions", {"prompt": "x"}, direct, engines)
        assert taken == direct, "one token between the first and the error"
        assert '"b "' in text and text.rstrip().endswith('"code":"engine_dead"}}')
        assert record.status == 503 and record.output_tokens == 2


def test_a_client_that_does_not_read_is_waited_for() -> None:
    paused: list[int] = []

    def fill(protocol: Any, transport: Written) -> None:
        if len(transport.writes) == 3:
            protocol.pause_writing()
            asyncio.get_running_loop().call_later(0.05, resume, protocol, transport)

    def resume(protocol: Any, transport: Written) -> None:
        paused.append(len(transport.writes))
        protocol.resume_writing()

    engines = FakeEngines()
    transport, _ = asyncio.run(
        asked("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 8}, engines, when_written=fill)
    )
    assert WRITE_SECONDS > 1 and paused == [3], "nothing is written while the client does not read"
    assert re.findall(r'"text":"(\w) "', transport.body) == list("abcdefgh")
    assert engines.taken == 5, "the second, the third, and those after the one that waited"


def test_a_client_that_leaves_ends_its_request() -> None:
    def leave(protocol: Any, transport: Written) -> None:
        if len(transport.writes) == 3:
            transport.lost = True
            protocol.connection_lost(None)

    engines, books = FakeEngines(), Books()
    transport, _ = asyncio.run(
        asked(
            "/v1/completions",
            {"prompt": "x", "stream": True, "max_tokens": 500},
            engines,
            books,
            when_written=leave,
        )
    )
    assert len(transport.writes) == 3 and len(engines.left) == 1
    (record,) = books.records
    assert record.status == 499 and 3 <= record.output_tokens < 500
