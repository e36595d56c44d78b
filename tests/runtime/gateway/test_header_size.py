"""A connection's headers are bounded: also those of its later requests, and while a request is answered."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from sidestream.runtime.gateway import server_process
from sidestream.runtime.gateway.settings import MAX_HEADER_BYTES
from support.gateway import FakeEngines
from support.written import connector
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def request(size: int = 1) -> bytes:
    body = json.dumps({"prompt": "x" * size, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture(autouse=True, params=[HttpToolsProtocol, H11Protocol])
def protocol_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "AutoHTTPProtocol", request.param)


@pytest.mark.parametrize("before", ["nothing", "an answer", "an open request"])
def test_an_endless_header_ends_its_connection(before: str) -> None:
    async def run() -> None:
        engines = FakeEngines()
        protocol, transport = connector(engines)()
        if before == "an open request":
            engines.gate.clear()
        if before != "nothing":
            protocol.data_received(request())
            await until(lambda: transport.writes if before == "an answer" else engines.asked)
        protocol.data_received(b"POST / HTTP/1.1\r\n")
        sent = 0
        while not (transport.closed or transport.paused) and sent < 100 * MAX_HEADER_BYTES:
            protocol.data_received(b"X: " + b"a" * 1000 + b"\r\n")
            sent += 1000
        assert sent <= 2 * MAX_HEADER_BYTES
        protocol.connection_lost(None)

    asyncio.run(run())


@pytest.mark.parametrize("part", [10_000, 250_000])
@pytest.mark.parametrize("pipelined", [False, True])
def test_large_bodies_are_no_headers(pipelined: bool, part: int) -> None:
    async def run() -> None:
        engines = FakeEngines()
        protocol, transport = connector(engines)()
        if pipelined:
            engines.gate.clear()
        data = request() + request(400_000) + request(300_000)
        for start in range(0, len(data), part):
            if transport.paused and not engines.gate.is_set():
                engines.gate.set()
            await until(lambda: not transport.paused)
            protocol.data_received(data[start : start + part])
            assert not transport.closed
        engines.gate.set()
        await until(lambda: b"".join(transport.writes).count(b"HTTP/1.1 200") == 3)
        protocol.connection_lost(None)

    asyncio.run(run())
