"""Clients of HTTP/1.0, and paths that probes and proxies expect."""

import asyncio
import json
import socket
from typing import Any

import pytest
from sidestream.runtime.gateway.interfaces import GatewayHealth
from support.gateway import Books, FakeEngines, events, gateway, listening

CHAT = {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 5, "stream": True}


def raw(place: tuple[str, int], head: str, body: dict[str, Any] | None = None) -> tuple[str, bytes]:
    """The head and all bytes after it until the server closes."""
    data = b"" if body is None else json.dumps(body).encode()
    with socket.create_connection(place, timeout=60) as connection:
        more = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n" if data else ""
        connection.sendall(f"{head}\r\n{more}\r\n".encode() + data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    start, _, rest = answer.partition(b"\r\n\r\n")
    return start.decode().lower(), rest


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
@pytest.mark.parametrize("keep", ["", "\r\nConnection: keep-alive"])
def test_a_stream_ends_with_the_connection_and_has_no_chunks(loop: str, keep: str) -> None:
    with listening(FakeEngines(), loop=loop) as place:
        start, body = raw(place, f"POST /v1/chat/completions HTTP/1.0{keep}", CHAT)
        assert start.startswith("http/1.1 200") and "transfer-encoding" not in start and "connection: close" in start
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
        texts = [event["choices"][0]["delta"].get("content", "") for event in events(body.decode())[:-1]]
        assert "".join(texts) == "a b c d e "


def test_a_body_of_known_length_has_its_length() -> None:
    with listening(FakeEngines()) as place:
        start, body = raw(place, "GET /v1/models HTTP/1.0")
        assert f"content-length: {len(body)}" in start and json.loads(body)["data"][0]["id"] == "base"
        start, body = raw(place, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close", CHAT)
        assert "transfer-encoding: chunked" in start and body.endswith(b"0\r\n\r\n"), "HTTP/1.1 has chunks"


def test_ping_answers_as_ready_without_a_body_or_a_key() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines, Books(api_key="secret")) as http:
            for method in ("GET", "POST"):
                found = await http.request(method, "/ping")
                assert (found.status_code, found.content) == (200, b"")
            for status in ("loading", "draining", "dead"):
                engines.status = GatewayHealth(status)  # type: ignore[arg-type]
                found = await http.get("/ping")
                assert (found.status_code, found.content) == (503, b"") and found.headers["retry-after"]

    asyncio.run(scene())


def test_models_with_a_slash_and_no_name_is_the_list() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()
            assert (await http.get("/v1/models/shout")).json()["id"] == "shout"
            assert (await http.get("/v1/models/other")).status_code == 404

    asyncio.run(scene())
