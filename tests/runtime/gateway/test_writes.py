"""What one request costs the event loop and the socket, counted: tasks, and writes to the connection."""

import asyncio
from typing import Any

import pytest
from support.written import asked


@pytest.mark.parametrize("chat", [False, True])
def test_the_head_leaves_with_the_first_token_and_the_end_with_the_last(chat: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "stream": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    transport, tasks = asyncio.run(asked(path, body))
    writes = transport.writes
    assert len(writes) == 3, "one for each of the tokens that came one by one"
    assert writes[0].startswith(b"HTTP/1.1 200") and b'"a "' in writes[0]
    assert b"[DONE]" in writes[-1] and writes[-1].endswith(b"0\r\n\r\n")
    assert tasks == 2, "the request's, and the one that looks whether the client is there"


def test_a_whole_answer_and_an_error_are_one_write() -> None:
    for body, status in (({"prompt": "x"}, b"200"), ({"prompt": "x", "model": "none"}, b"404")):
        transport, _ = asyncio.run(asked("/v1/completions", body))
        (written,) = transport.writes
        assert written.startswith(b"HTTP/1.1 " + status) and written.endswith(b"}")
