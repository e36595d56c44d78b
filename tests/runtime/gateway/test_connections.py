"""What clients may do to the socket: slowly, too much, by halves, or without sense. The gateway answers what it can,
cuts the rest, and other clients do not notice.
"""

import gc
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway import connections
from support.gateway import FakeEngines, listening

Place = tuple[str, int]
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CASES, MANY = 300, 100_000


def request(body: bytes, more: bytes = b"") -> bytes:
    return ASK + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


@contextmanager
def connected(place: Place) -> Iterator[socket.socket]:
    with socket.create_connection(place, timeout=60) as peer:
        yield peer


def until_end(peer: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    try:
        while part := peer.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


def well(place: Place) -> None:
    url = f"http://{place[0]}:{place[1]}/v1/completions"
    answer = httpx.post(url, json={"prompt": "x", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "a b "


def test_pipelined_requests_are_answered_in_order() -> None:
    with listening(FakeEngines()) as place, connected(place) as peer:
        bodies = [
            json.dumps({"prompt": "x", "max_tokens": count, "stream": count == 2}).encode() for count in (3, 2, 1)
        ]
        peer.sendall(b"".join(map(request, bodies[:2])) + request(bodies[2], b"Connection: close\r\n"))
        data = until_end(peer).decode()
        first, second, third = data.split("HTTP/1.1 200")[1:]
        assert "a b c " in first and "[DONE]" in second and '"text":"a "' in third


def test_a_closed_connection_leaves_no_reference_cycle() -> None:
    """Its memory is free at once, and not at the next garbage collection."""

    def kept() -> list[object]:
        return [each for each in gc.get_objects() if type(each).__name__ in ("LimitedProtocol", "RequestResponseCycle")]

    with listening(FakeEngines()) as place:
        gc.collect()
        gc.disable()
        try:
            before = len(kept())
            for body in (b"not JSON", b'{"prompt": "x", "max_tokens": 2}', b'{"prompt": "x", "stream": true}'):
                for more in (b"", b"Connection: close\r\n"):
                    with connected(place) as peer:
                        peer.sendall(request(body, more))
                        peer.recv(100)
            until = time.monotonic() + 60
            while len(kept()) > before and time.monotonic() < until:
                time.sleep(0.05)
            assert len(kept()) == before
        finally:
            gc.enable()


def test_a_half_header_and_an_unread_answer_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.2)
    with listening(FakeEngines()) as place:
        with connected(place) as silent, connected(place) as slow:
            for letter in ASK:
                try:
                    slow.send(bytes([letter]))
                except OSError:
                    break
                time.sleep(0.02)
            assert until_end(silent) == b"" and until_end(slow) == b""
        engines = FakeEngines()
        with listening(engines) as other, connected(other) as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {"prompt": "x", "max_tokens": 1 << 20, "stream": True, "logprobs": 20}
            unread.sendall(request(json.dumps(body).encode()))
            until = time.monotonic() + 60
            while not engines.left and time.monotonic() < until:
                time.sleep(0.01)
            assert engines.left, "what nobody reads is aborted"
        well(place)


def test_headers_are_bounded() -> None:
    with listening(FakeEngines()) as place:
        with connected(place) as peer:
            peer.sendall(
                b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"a" * 70_000 + b"\r\n\r\n"
            )
            assert until_end(peer)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"")
        with connected(place) as endless:
            try:
                for _ in range(2000):
                    endless.sendall(b"X: " + b"a" * 1000)
            except OSError:
                pass
            assert b"HTTP/1.1 2" not in until_end(endless)
        well(place)


def test_a_hundred_megabytes_are_answered_with_413_and_not_kept() -> None:
    with listening(FakeEngines()) as place, connected(place) as peer:
        peer.sendall(ASK + b"Content-Length: 104857600\r\n\r\n")
        assert peer.recv(1 << 16).startswith(b"HTTP/1.1 413"), "before the body is sent"
        well(place)


def test_a_client_that_cuts_its_stream_aborts_the_request() -> None:
    engines = FakeEngines()
    with listening(engines) as place:
        with connected(place) as peer:
            body = {"prompt": "x", "max_tokens": 1 << 20, "stream": True}
            peer.sendall(request(json.dumps(body).encode()))
            while b"data: " not in peer.recv(1 << 16):
                pass
        until = time.monotonic() + 60
        while not engines.left and time.monotonic() < until:
            time.sleep(0.005)
        assert engines.left == [engines.asked[0].request_id]
        well(place)


def hostile(draw: random.Random) -> bytes:
    """Bytes that begin as a request, and do not stay one."""
    values: list[Any] = [
        0,
        -1,
        1e308,
        "",
        "x",
        None,
        True,
        [],
        {},
        [[]],
        2**63,
        "\x00",
        "\ud800".encode("utf-8", "replace").decode(),
    ]
    fields = [
        "prompt",
        "messages",
        "model",
        "n",
        "max_tokens",
        "stop",
        "logit_bias",
        "stream",
        "logprobs",
        "nope",
        "input",
    ]
    body = json.dumps({draw.choice(fields): draw.choice(values) for _ in range(draw.randrange(6))}).encode()
    data = bytearray(
        draw.choice(
            [
                request(body),
                request(body, b"Transfer-Encoding: chunked\r\n"),
                ASK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
                ASK + b"Content-Length: %d\r\n\r\n" % draw.choice([0, 10**6, 10**30]) + body,
                ASK + b"Content-Length: -5\r\n\r\n" + body,
                b"%s %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
                % (
                    draw.choice([b"GET", b"PUT", b"BREW"]),
                    draw.choice([b"/", b"/v1/models/%ff", b"*", b"/docs?" + b"a" * 999]),
                ),
                request(b'{"prompt":' * draw.randrange(1, 2000)),
                draw.randbytes(draw.randrange(1, 300)),
            ]
        )
    )
    for _ in range(draw.choice([0, 0, 1, 3])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    if draw.random() < 0.3:
        del data[draw.randrange(len(data)) :]
    return bytes(data)


def test_hostile_bytes_never_harm_the_gateway_or_a_stream(pytestconfig: pytest.Config) -> None:
    draw = random.Random(23)
    engines = FakeEngines()
    long = {"prompt": "x", "max_tokens": 1 << 22, "stream": True}
    count = MANY if pytestconfig.getoption("--exhaustive") else CASES
    with listening(engines, body_seconds=0.2) as place, connected(place) as witness:
        witness.sendall(request(json.dumps(long).encode()))
        seen = 0
        for case in range(count):
            data = hostile(draw)
            with connected(place) as peer:
                try:
                    peer.sendall(data)
                    peer.shutdown(socket.SHUT_WR)
                except OSError:
                    continue  # it was cut before all was sent
                answer = until_end(peer)
            assert not answer.startswith(b"HTTP/1.1 5"), (case, data, answer)
            seen += len(witness.recv(1 << 20))
        assert seen > count, "the stream goes on"
        well(place)
