"""A shutdown with open streams: they end with an error event, and new requests are refused with the reason."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.serving import GUARD, serve_fake

OPEN = {"num_pages": 200, "max_num_seqs": 4, "max_model_len": 4096, "step_seconds": 0.02}


@contextmanager
def running(kind: str, folder: Path, drain: float = 5.0) -> Iterator[tuple[int, Callable[[], int], Path]]:
    """A server that drains for so many seconds: its port, a function that sends SIGTERM and waits, and its log."""
    if kind == "gateway":
        log = folder / "gateway.log"
        with serve_fake(folder, **OPEN) as engine, log.open("w") as output:
            command = [sys.executable, "-m", "sidestream.tools.cli", "gateway", "--engine", engine.address]
            process = subprocess.Popen(
                [*command, "--port", "0", "--drain-seconds", str(drain), "--usage-log", "none"],
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            try:
                yield port_when_ready(log), lambda: end(process), log
            finally:
                process.kill()
                process.wait()
        return
    count = 2 if kind == "engines" else 1
    with serve_fake(folder, engines=count, http=True, drain_seconds=drain, **OPEN) as server:
        yield port_when_ready(server.log), lambda: end(server.process), server.log


def end(process: Any) -> int:
    process.send_signal(signal.SIGTERM)
    return int(process.wait(GUARD))


def port_when_ready(log: Path) -> int:
    limit = time.monotonic() + GUARD
    while True:
        words = [word for word in log.read_text().split() if word.startswith("http://127.0.0.1:")]
        if words:
            port = int(words[0].rstrip("/").rpartition(":")[2])
            if ask(port, "/ready")[0] == 200:
                return port
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.05)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD)
    headers = {"Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def opened(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    """A stream whose first event has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
    stream = connection.getresponse()
    while not (line := stream.readline()).startswith(b"data: "):
        assert line in (b": waiting\n", b"\n")
    return stream


@pytest.mark.parametrize("kind", ["server", "engines", "gateway"])
def test_open_streams_end_with_an_error_and_newcomers_hear_the_reason(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as (port, stop, log):
        endless = {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
        stream = opened(port, endless)
        whole: list[tuple[int, str]] = []
        waiting = threading.Thread(target=lambda: whole.append(ask(port, "/v1/completions", endless)))
        waiting.start()
        time.sleep(0.3)  # it is open in the engine
        codes: list[int] = []
        stopping = threading.Thread(target=lambda: codes.append(stop()))
        stopping.start()
        while ask(port, "/ready")[0] == 200:
            time.sleep(0.01)
        assert json.loads(ask(port, "/ready")[1])["status"] == "draining" and ask(port, "/ping")[0] == 503
        status, text = ask(port, "/v1/completions", {"prompt": [1], "max_tokens": 2})
        assert (status, json.loads(text)["error"]["code"]) == (503, "draining"), text
        status, text = ask(port, "/v1/completions", {"prompt": [1], "max_tokens": 2, "stream": True})
        assert (status, json.loads(text)["error"]["code"]) == (503, "draining"), text
        *_, last, nothing = stream.read().decode().split("\n\n")
        assert nothing == "" and json.loads(last.removeprefix("data: "))["error"]["code"] == "draining", last
        waiting.join(GUARD)
        assert [(status, json.loads(text)["error"]["code"]) for status, text in whole] == [(503, "draining")]
        stopping.join(GUARD)
        assert codes == [0] and "Traceback" not in log.read_text() and "ERROR" not in log.read_text(), log.read_text()


def test_a_gateway_ends_as_soon_as_its_last_stream_has_ended(tmp_path: Path) -> None:
    with running("gateway", tmp_path, drain=600.0) as (port, stop, log):
        stream = opened(port, {"prompt": [7], "max_tokens": 20, "ignore_eos": True, "temperature": 0})
        assert stop() == 0
        assert stream.read().endswith(b"data: [DONE]\n\n"), "an open request is finished"
        assert log.read_text().count("\n") <= 3
