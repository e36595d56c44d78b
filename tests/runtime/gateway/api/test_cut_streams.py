"""A gateway before an engine whose processes are as in production: what its clients do to the engine, and what they see
when there is none.
"""

import json
import socket
import time
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from sidestream.runtime.client.client import Client
from sidestream.runtime.gateway.router.router import Router
from support.gateway import listening
from support.serving import GUARD, serve_fake

SIZES: dict[str, Any] = {"num_pages": 64, "max_num_seqs": 8, "max_model_len": 640, "step_seconds": 0.25}
TRIES = 5


def ask(place: tuple[str, int], prompt: list[int], **fields: Any) -> tuple[socket.socket, HTTPResponse]:
    """A request's connection, and its answer as far as its headers."""
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0} | fields
    connection = HTTPConnection(*place, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection.sock, connection.getresponse()


def ready(place: tuple[str, int]) -> int:
    connection = HTTPConnection(*place, timeout=120)
    connection.request("GET", "/ready")
    return connection.getresponse().status


def streamed(place: tuple[str, int], prompt: list[int]) -> tuple[socket.socket, HTTPResponse]:
    """A stream, of which the first token has come."""
    connection, answer = ask(place, prompt, stream=True)
    while (line := answer.readline()) in (b": waiting\n", b"\n"):
        pass
    assert line.startswith(b"data: ")
    return connection, answer


def test_cut_connections_free_their_pages_within_two_steps(tmp_path: Path) -> None:
    with (
        serve_fake(tmp_path, **SIZES) as engine,
        Client(engine.address, connect_timeout=60) as client,
        listening(Router([engine.address])) as place,  # type: ignore[arg-type]
    ):
        for _ in range(TRIES):
            if steps_until_free(client, place) <= 2:
                break
        else:
            raise AssertionError(f"it took longer {TRIES} times")


def steps_until_free(client: Client, place: tuple[str, int]) -> int:
    """The engine's steps from its last look before it aborted three streams until their pages are free.

    A busy machine may look late, so that steps count which came after; never are there too few.
    """
    stays, _ = streamed(place, [1])
    alone = client.stats()["pages_in_use"]
    cut = [streamed(place, [number] * 130) for number in range(3)]
    before = client.stats()
    aborted_at = before["steps_total"]
    assert before["pages_in_use"] >= alone + 3 * 3
    for connection, _ in cut:
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    while (stats := client.stats())["aborted_total"] < before["aborted_total"] + 3:
        aborted_at = stats["steps_total"]
        time.sleep(0.002)
    while (stats := client.stats())["pages_in_use"] > alone + 1:  # the stream that stays may have grown by one
        time.sleep(0.002)
    stays.shutdown(socket.SHUT_RDWR)
    stays.close()
    while client.stats()["pages_in_use"]:
        time.sleep(0.002)
    return int(stats["steps_total"] - aborted_at)


def test_with_all_engines_down_requests_wait_and_are_then_told_to_come_back(tmp_path: Path) -> None:
    patience = 3.0
    with serve_fake(tmp_path, **SIZES) as engine:
        router = Router([engine.address, f"ipc://{tmp_path}/nobody.sock"], patience_seconds=patience, poll_seconds=0.05)
        with listening(router) as place:  # type: ignore[arg-type]
            limit = time.monotonic() + GUARD
            while ready(place) != 200:  # an engine may take longer to start than a request is patient
                assert time.monotonic() < limit, engine.log.read_text()
                time.sleep(0.05)
            _, open_answer = streamed(place, [1])
            killed = time.monotonic()
            engine.process.kill()
            engine.process.wait()
            assert b"engine_dead" in open_answer.read(), "a stream that has begun ends with an error, not in silence"
            assert time.monotonic() - killed >= patience, "it waits for an engine first"
            for fields in ({}, {"stream": True}):
                _, refused = ask(place, [2], **fields)
                told = json.loads(refused.read())["error"]
                assert (refused.status, told["code"]) == (503, "engine_dead"), told
                assert int(refused.headers["Retry-After"]) >= 1

    fresh = Router([f"ipc://{tmp_path}/nobody.sock", f"ipc://{tmp_path}/none.sock"], patience_seconds=patience)
    with listening(fresh) as place:  # type: ignore[arg-type]
        _, refused = ask(place, [2])
        assert refused.status == 503 and refused.headers["Retry-After"] is not None, "also before any engine was there"
