"""A client that has sent its request and closes that direction gets its answer; one that is gone costs nothing."""

import json
import socket
import time
from collections.abc import Iterator

import pytest
from sidestream.runtime.gateway import server_process
from support.gateway import FakeEngines, listening
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PROTOCOLS = [(HttpToolsProtocol, "uvloop"), (H11Protocol, "asyncio")]
"""What uvicorn uses with the extra fast-http, and without it."""


@pytest.fixture(params=PROTOCOLS, ids=["fast-http", "plain"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(server_process, "AutoHTTPProtocol", request.param[0])
    yield request.param[1]


def request(version: str = "1.1", **fields: object) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 3} | fields).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def until_end(peer: socket.socket) -> str:
    data = b""
    while part := peer.recv(1 << 16):
        data += part
    return data.decode()


def until(condition: object) -> None:
    end = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_comes_after_a_half_close(loop: str, stream: bool, version: str) -> None:
    engines = FakeEngines()
    engines.gate.clear()
    with listening(engines, loop=loop) as place, socket.create_connection(place, timeout=60) as peer:
        peer.sendall(request(version, stream=stream))
        peer.shutdown(socket.SHUT_WR)
        until(lambda: engines.asked)
        peer.settimeout(1.2)  # longer than it takes to look whether the client is still there
        interim = b""
        with pytest.raises(TimeoutError):
            while True:
                interim += peer.recv(1 << 16)
        assert interim in (b"", b"HTTP/1.1 100 Continue\r\n\r\n")
        peer.settimeout(60)
        engines.gate.set()
        answer = until_end(peer)
        assert answer.startswith("HTTP/1.1 200") and ("[DONE]" in answer if stream else '"text":"a b c "' in answer)
        assert engines.left == []


def test_all_pipelined_requests_are_answered_after_a_half_close(loop: str) -> None:
    with listening(FakeEngines(), loop=loop) as place, socket.create_connection(place, timeout=60) as peer:
        peer.sendall(request(max_tokens=1) + request(max_tokens=2, stream=True) + request(max_tokens=3))
        peer.shutdown(socket.SHUT_WR)
        answer = until_end(peer)
        assert answer.count("HTTP/1.1 200") == 3 and answer.index('"text":"a "') < answer.index('"text":"a b c "')


def test_a_client_that_closes_both_directions_aborts_its_request(loop: str) -> None:
    engines = FakeEngines()
    engines.gate.clear()
    with listening(engines, loop=loop) as place:
        with socket.create_connection(place, timeout=60) as peer:
            peer.sendall(request(max_tokens=1000))
            until(lambda: engines.asked)
        until(lambda: engines.left)


def test_half_a_request_is_dropped_at_its_half_close(loop: str) -> None:
    engines = FakeEngines()
    with listening(engines, loop=loop) as place:
        for part in (b"", request()[:30], request()[:-3]):
            with socket.create_connection(place, timeout=60) as peer:
                peer.sendall(part)
                peer.shutdown(socket.SHUT_WR)
                assert until_end(peer) == ""
    assert engines.asked == []
