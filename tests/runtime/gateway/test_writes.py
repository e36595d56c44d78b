"""What one request costs the event loop and the socket, counted: tasks, and writes to the connection."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from sidestream.runtime.gateway.observe.metrics import Metrics
from sidestream.runtime.gateway.observe.watch import Watch
from sidestream.runtime.gateway.serving.app import build_app
from sidestream.runtime.gateway.serving.open_door import OpenDoor
from sidestream.runtime.gateway.serving.process import server_config
from sidestream.runtime.gateway.settings import GatewaySettings
from support.gateway import FakeEngines
from uvicorn.server import ServerState


class Written(asyncio.Transport):
    """A connection that keeps what is written to it, write by write."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def asked(path: str, body: dict[str, Any]) -> tuple[list[bytes], int]:
    """The writes of an answer, and how many tasks the request took."""
    settings, tasks = GatewaySettings(), []
    loop = asyncio.get_running_loop()
    config = server_config(build_app(FakeEngines(), OpenDoor(), Watch(Metrics()), settings), settings, 1.0)
    config.load()
    protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
    transport, data = Written(), json.dumps(body).encode()

    def counted(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
        tasks.append(asyncio.Task(work, loop=loop, **more))
        return tasks[-1]

    protocol.connection_made(transport)
    loop.set_task_factory(counted)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    protocol.data_received(head.encode() + data)
    await asyncio.wait(tasks)
    count = len(tasks)
    loop.set_task_factory(None)
    protocol.connection_lost(None)
    return transport.writes, count


@pytest.mark.parametrize("chat", [False, True])
def test_the_head_leaves_with_the_first_token_and_the_end_with_the_last(chat: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "stream": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    writes, tasks = asyncio.run(asked(path, body))
    assert len(writes) == 3, "one for each of the tokens that came one by one"
    assert writes[0].startswith(b"HTTP/1.1 200") and b'"a "' in writes[0]
    assert b"[DONE]" in writes[-1] and writes[-1].endswith(b"0\r\n\r\n")
    assert tasks == 2, "the request's, and the one that looks whether the client is there"


def test_a_whole_answer_and_an_error_are_one_write() -> None:
    for body, status in (({"prompt": "x"}, b"200"), ({"prompt": "x", "model": "none"}, b"404")):
        writes, _ = asyncio.run(asked("/v1/completions", body))
        (written,) = writes
        assert written.startswith(b"HTTP/1.1 " + status) and written.endswith(b"}")
