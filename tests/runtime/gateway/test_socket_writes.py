"""Batched writes: tasks and writes to the connection of one request."""

import asyncio
from typing import Any

import pytest
from sidestream.runtime.gateway.socket_writes import BatchingTransport, DirectBody, FlushQueue
from support.written import Written, asked

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("chat", [False, True])
def test_head_and_first_token_are_one_write_as_are_last_token_and_end(chat: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "stream": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    transport, tasks = asyncio.run(asked(path, body))
    writes = transport.writes
    assert len(writes) == 3, "one per token"
    assert writes[0].startswith(b"HTTP/1.1 200") and b'"a "' in writes[0]
    assert b"[DONE]" in writes[-1] and writes[-1].endswith(b"0\r\n\r\n")
    assert tasks == 2, "one for the request, one that waits for a disconnect"


def test_an_unstreamed_answer_and_an_error_are_one_write() -> None:
    for body, status in (({"prompt": "x"}, b"200"), ({"prompt": "x", "model": "none"}, b"404")):
        transport, _ = asyncio.run(asked("/v1/completions", body))
        (written,) = transport.writes
        assert written.startswith(b"HTTP/1.1 " + status) and written.endswith(b"}")


def test_direct_parts_are_one_write_per_connection_and_precede_later_writes() -> None:
    order: list[str] = []

    async def main() -> tuple[Written, Written]:
        flush_queue = FlushQueue()
        first = Written(lambda protocol, transport: order.append("first"))
        second = Written(lambda protocol, transport: order.append("second"))
        connections = [BatchingTransport(transport, flush_queue) for transport in (first, second)]
        bodies = [DirectBody(connection) for connection in connections]
        for body in bodies:
            body.begin(HEAD)
        for part in (b"a", b"bc"):
            for body in bodies:
                body.write(part)
        assert not order, "the event loop iteration has not ended"
        connections[1].write(b"later")
        await asyncio.sleep(0)
        bodies[0].write(b"d")
        await asyncio.sleep(0)
        return first, second

    first, second = asyncio.run(main())
    assert first.writes == [b"1\r\na\r\n2\r\nbc\r\n", b"1\r\nd\r\n"]
    assert second.writes == [b"1\r\na\r\n2\r\nbc\r\n", b"later"]
    assert order == ["second", "second", "first", "first"]


def test_only_a_chunked_body_can_be_written_directly() -> None:
    body = DirectBody(BatchingTransport(Written(lambda protocol, transport: None), FlushQueue()))
    assert not body.ready, "the head was not sent"
    body.begin(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
    assert not body.ready
    body.begin(HEAD)
    assert body.ready
