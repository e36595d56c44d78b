"""Many connections at once: those without a request make room for newcomers, and refusals can be read by pages."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from sidestream.runtime.gateway import connections
from support.gateway import FakeEngines, listening
from support.written import connector

Place = tuple[str, int]
PAGE = "http://localhost:5173"


@contextmanager
def crowd(place: Place, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections that have sent these bytes."""
    with ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(place, timeout=60)) for _ in range(count)]
        for peer in peers:
            peer.sendall(sent)
        yield peers


def ask(place: Place, path: str = "/version", **headers: str) -> httpx.Response:
    return httpx.get(f"http://{place[0]}:{place[1]}{path}", headers=headers, timeout=60)


def is_closed(peer: socket.socket) -> bool:
    """Return whether the other side closes the connection without a word."""
    try:
        return peer.recv(100) == b""
    except ConnectionResetError:
        return True


def busy(engines: FakeEngines, place: Place, stack: ExitStack, count: int) -> None:
    """Open connections with a request that is not answered before engines.gate opens."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    before = len(engines.asked)
    stack.enter_context(crowd(place, count, head.encode() + body))
    until = time.monotonic() + 60
    while len(engines.asked) < before + count:
        assert time.monotonic() < until, "the requests did not arrive"
        time.sleep(0.005)


@pytest.mark.parametrize("sent", [b"", b"GET /version HTTP/1.1\r\nX-Half: "])
@pytest.mark.parametrize("limit", [{"max_connections": 20}, {"connections_per_client": 20}])
def test_ten_times_the_limit_of_silent_connections_keep_nobody_out(sent: bytes, limit: dict[str, int]) -> None:
    with listening(FakeEngines(), **limit) as place, crowd(place, 200, sent) as peers:
        assert ask(place).status_code == 200, "at once, not when the silent ones have timed out"
        assert is_closed(peers[0]), "the oldest goes first"
        peers[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            peers[-1].recv(1)


def test_silent_connections_go_before_those_that_rest_after_a_request() -> None:
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with listening(FakeEngines(), max_connections=3) as place, crowd(place, 1, request) as (resting,):
        assert resting.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with crowd(place, 2) as silent:
            assert ask(place).status_code == 200
            assert is_closed(silent[0])
            resting.sendall(request)
            assert resting.recv(1 << 16).startswith(b"HTTP/1.1 200"), "the same connection goes on"
    with listening(FakeEngines(), max_connections=3) as place, crowd(place, 3, request) as others:
        assert all(peer.recv(1 << 16).startswith(b"HTTP/1.1 200") for peer in others)
        assert ask(place).status_code == 200, "with nothing but resting connections around"


def test_open_requests_are_never_cut_for_newcomers() -> None:
    engines = FakeEngines()
    engines.gate.clear()
    with listening(engines, connections_per_client=4) as place, ExitStack() as stack:
        busy(engines, place, stack, 4)
        answer = ask(place)
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "too_many_connections"
        assert answer.headers["retry-after"] == "1" and answer.headers["connection"] == "close"
        assert ask(place, "/health").status_code == 200, "a probe must not end a server that is busy"
        assert engines.left == []


@pytest.mark.parametrize(("limit", "status"), [({"connections_per_client": 1}, 429), ({"max_connections": 1}, 503)])
@pytest.mark.parametrize(
    ("allowed", "origin", "readable"),
    [(None, PAGE, PAGE), (["https://app.example"], "https://app.example", "https://app.example"), (["*"], PAGE, "*"),
     (["https://app.example"], PAGE, None)],
)  # fmt: skip
def test_a_page_can_read_why_its_connection_is_refused(
    limit: dict[str, int], status: int, allowed: list[str] | None, origin: str, readable: str | None
) -> None:
    engines = FakeEngines()
    engines.gate.clear()
    with listening(engines, allowed_origins=allowed, **limit) as place, ExitStack() as stack:
        busy(engines, place, stack, 1)
        answer = ask(place, Origin=origin)
        assert answer.status_code == status and answer.headers.get("access-control-allow-origin") == readable
        if readable:
            assert "retry-after" in answer.headers["access-control-expose-headers"]
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            url = f"http://{place[0]}:{place[1]}/v1/completions"
            assert httpx.options(url, headers=asked, timeout=60).status_code == 200, "else a page sees no 429"


def test_refused_connections_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_REFUSED", 4)
    engines = FakeEngines()
    engines.gate.clear()
    with listening(engines, max_connections=1) as place, ExitStack() as stack:
        busy(engines, place, stack, 1)
        peers = stack.enter_context(crowd(place, 40))
        assert all(is_closed(peer) for peer in peers[:36])
        assert ask(place).status_code == 503


def test_refused_connections_of_one_address_leave_room_for_others() -> None:
    async def run() -> None:
        connect = connector(FakeEngines(), max_connections=2)
        peers = []
        for host, count in (("192.0.2.1", 2 * connections.MAX_REFUSED), ("192.0.2.2", 2)):
            for _ in range(count):
                protocol, transport = connect(host)
                if not transport.closed:
                    protocol.data_received(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    peers.append((host, protocol))
        hosts = [host for host, _ in peers]
        assert hosts.count("192.0.2.1") == 1 + connections.MAX_REFUSED // 2 and hosts.count("192.0.2.2") == 2
        for _, protocol in peers:
            protocol.connection_lost(None)

    asyncio.run(run())
