"""The access log: one JSON object per line, and no request waits for it."""

import contextlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.gateway.interfaces import AdmittedRequest, Caller, HttpExchange, UsageRecord
from sidestream.runtime.gateway.metrics import access_log
from sidestream.runtime.gateway.metrics.access_log import AccessLog

EXCHANGE = AdmittedRequest(
    "r1", "/v1/completions", Caller("o", "k"), "::1", "sql", "sql", True, ["secret"], SamplingParams()
)
RECORD = UsageRecord(1e9, "r1", "/v1/completions", "o", "k", "llama", "sql", "aa", 10, 5, 4, 0.25, 1.25, 200)
ANSWER = HttpExchange(
    1_900_000_000.25, "r1", "POST", "/v1/completions", "/v1/completions", 200, 1.3, 99, "10.0.0.1", "search"
)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_tells_the_exchange_and_its_usage(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "access.log")
    log.on_admitted(EXCHANGE)
    log.on_finished(EXCHANGE, RECORD)
    log.on_http_exchange(ANSWER)
    log.on_http_exchange(replace(ANSWER, request_id="r2", method="GET", path="/health\n{\udcff" + "x" * 9999, owner=""))
    log.close()
    first, second = lines(tmp_path / "access.log")
    assert first == {
        "time": "2030-03-17T17:46:40.250Z", "request_id": "r1", "client": "10.0.0.1", "owner": "search",
        "method": "POST", "path": "/v1/completions", "status": 200, "seconds": 1.3, "bytes": 99, "key": "k",
        "model": "llama", "adapter": "sql", "prompt_tokens": 10, "output_tokens": 5, "cached_tokens": 4,
        "first_token_seconds": 0.25, "error": "",
    }  # fmt: skip
    assert second["path"] == "/health\n{?" + "x" * 502 and "model" not in second
    assert "secret" not in (tmp_path / "access.log").read_text()


def test_two_open_requests_may_have_one_id(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "access.log")
    for tokens in (5, 7):
        log.on_finished(EXCHANGE, replace(RECORD, output_tokens=tokens))
    for _ in range(3):
        log.on_http_exchange(ANSWER)
    log.close()
    assert [line.get("output_tokens") for line in lines(tmp_path / "access.log")] == [7, 5, None]


def test_a_file_that_was_moved_away_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(path)
    log.on_http_exchange(ANSWER)
    while not path.read_text():
        threading.Event().wait(0.005)
    path.rename(tmp_path / "access.log.1")
    log.on_http_exchange(replace(ANSWER, request_id="r2"))
    log.close()
    assert [line["request_id"] for line in lines(tmp_path / "access.log.1")] == ["r1"]
    assert [line["request_id"] for line in lines(path)] == ["r2"] and log.dropped == 0


def test_a_stuck_pipe_drops_lines_and_holds_up_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = AccessLog(tmp_path / "pipe", max_queued=10)
    for _ in range(2000):  # a pipe holds 64 KiB, and nobody reads
        log.on_http_exchange(ANSWER)
    assert log.dropped > 0
    os.set_blocking(reader, True)
    drain = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reader, 65536), b"")])
    drain.start()
    log.close()
    drain.join()
    os.close(reader)


def stuck(folder: Path) -> tuple[AccessLog, int, int]:
    """(a log whose queue is full and whose pipe takes nothing, how many lines it was given, the pipe's reading end)."""
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    filler = os.open(folder / "pipe", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, b"0")
    log = AccessLog(folder / "pipe", max_queued=10)
    os.close(filler)
    os.set_blocking(reader, True)
    sent = 0
    while log.dropped == 0:
        log.on_http_exchange(ANSWER)
        sent += 1
    return log, sent, reader


def test_a_queue_that_is_full_at_the_end_is_written(tmp_path: Path) -> None:
    log, sent, reader = stuck(tmp_path)
    closing = threading.Thread(target=log.close)
    closing.start()
    read = b"".join(iter(lambda: os.read(reader, 65536), b""))
    closing.join()
    os.close(reader)
    assert read.count(b"\n") == sent - 1 and log.dropped == 1


def test_a_pipe_that_nobody_reads_keeps_no_gateway_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "CLOSING_SECONDS", 0.05)
    log, _sent, reader = stuck(tmp_path)
    log.close()
    assert log.dropped >= 10, "what is queued is not written"
    monkeypatch.undo()
    drain = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reader, 65536), b"")])
    drain.start()
    log.close()  # its thread ends before the test
    drain.join()
    os.close(reader)


def test_stdout_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    log = AccessLog(None)
    log.on_http_exchange(ANSWER)
    log.close()
    assert json.loads(capsys.readouterr().out)["request_id"] == "r1"


def test_a_file_that_cannot_be_opened_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        AccessLog(tmp_path / "no" / "access.log")
