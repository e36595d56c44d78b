"""The usage log loses nothing while the disk works, and never delays requests."""

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sidestream.runtime.gateway.auth import usage_database, usage_log
from sidestream.runtime.gateway.auth.usage_database import Payload, UsageLogError, open_to_write
from sidestream.runtime.gateway.auth.usage_log import UsageLog
from sidestream.runtime.gateway.auth.usage_report import report
from sidestream.runtime.gateway.interfaces import UsageRecord
from sidestream.tools.cli import main

NOON = 1_900_000_000.0
RECORD = UsageRecord(
    NOON, "r", "/v1/completions", "search", "search-1", "llama", "sql", "aa" * 16, 10, 5, 4, 0.25, 1.5, 200
)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@contextmanager
def logging_to(path: Path, **options: Any) -> Iterator[UsageLog]:
    log = UsageLog(path, **options)
    try:
        yield log
    finally:
        log.close(60)


def rows(path: Path, query: str = "SELECT * FROM usage ORDER BY id") -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def test_every_record_is_written_with_all_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with logging_to(path) as log:
        for index in range(3000):
            log.put(replace(RECORD, request_id=str(index), draft_tokens=3, accepted_tokens=2))
    assert log.written == 3000 and log.dropped == 0
    found = rows(path)
    assert [row[2] for row in found] == [str(index) for index in range(3000)]
    assert found[0][1:] == (
        NOON, "0", "/v1/completions", "search", "search-1", "llama", "sql", "aa" * 16, 10, 5, 4, 0.25, 1.5, 200, "",
        3, 2,
    )  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_what_is_older_than_the_days_asked_for_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, day, clock = tmp_path / "usage.db", 86400.0, [NOON]
    monkeypatch.setattr(usage_log, "DELETE_SECONDS", 0.02)
    with logging_to(path) as log:
        for index in range(3000):
            log.put(replace(RECORD, time=NOON - 10 * day, request_id=str(index)))
            log.put(Payload(NOON - 10 * day, str(index), "search", "{}"))
        log.put(replace(RECORD, time=NOON - 2 * day, request_id="near"))
    assert len(rows(path)) == 3001, "nothing is deleted that nobody asked for"
    with logging_to(path, days=3, wall=lambda: clock[0]) as log:
        log.put(replace(RECORD, request_id="today"))
        until(lambda: [row[2] for row in rows(path)] == ["near", "today"])
        until(lambda: rows(path, "SELECT * FROM payloads") == [])
        clock[0] += 2 * day
        until(lambda: [row[2] for row in rows(path)] == ["today"])
    assert log.written == 1 and not log.problem


def test_nobody_waits_for_a_slow_disk(tmp_path: Path) -> None:
    """Another process holds the database: `put` returns all the same, and all is written when it lets go."""
    path = tmp_path / "usage.db"
    with logging_to(path) as log, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(500):
            log.put(RECORD)
        assert log.written == 0 and log.queued == 500
        other.execute("COMMIT")
        until(lambda: log.written == 500)
    assert len(rows(path)) == 500


def test_a_full_disk_is_a_warning_and_records_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.db"
    opened: list[sqlite3.Connection] = []

    def small(path: Path, check_pages: bool) -> sqlite3.Connection:
        opened.append(open_to_write(path))
        opened[-1].execute("PRAGMA max_page_count = 16")  # SQLite answers as on a full disk: SQLITE_FULL
        return opened[-1]

    monkeypatch.setattr(usage_database, "open_to_write", small)
    with caplog.at_level(logging.WARNING), logging_to(path, max_queued=1000, retry_seconds=0.01) as log:
        for _ in range(1500):
            log.put(RECORD)
        until(lambda: log.problem != "")
        assert "full" in log.problem and log.dropped > 0
        waiting, dropped = log.queued, log.dropped
        assert log.written + waiting + dropped == 1500
        opened[0].execute("PRAGMA max_page_count = 100000")
        until(lambda: log.queued == 0)
        assert log.problem == ""
    assert log.dropped == dropped and len(rows(path)) == log.written == 1500 - dropped
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2 and "full" in warnings[0] and "written again" in warnings[1]


def test_a_log_that_cannot_be_opened_yet_is_opened_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tries = tmp_path / "usage.db", [0]

    def full_at_first(path: Path, check_pages: bool) -> sqlite3.Connection:
        tries[0] += 1
        if tries[0] < 3:
            raise sqlite3.OperationalError("database or disk is full")
        return open_to_write(path)

    monkeypatch.setattr(usage_database, "open_to_write", full_at_first)
    with logging_to(path, retry_seconds=0.01) as log:
        assert "full" in log.problem
        assert log.tokens_since(0.0) == {}, "a start does not fail for it"
        log.put(RECORD)
        until(lambda: log.written == 1)
    assert len(rows(path)) == 1


def test_a_record_that_cannot_be_stored_holds_up_no_other(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with logging_to(path) as log, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # so that all make one batch
        for poison in (RECORD, replace(RECORD, request_id="\ud800"), replace(RECORD, prompt_tokens=1 << 70), RECORD):
            log.put(poison)
        other.execute("COMMIT")
        until(lambda: log.queued == 0)
    assert (log.written, log.dropped, len(rows(path))) == (2, 2, 2)


def test_payloads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage.db"
    monkeypatch.setattr(usage_log, "MAX_QUEUED_PAYLOAD", 100)
    with logging_to(path) as log:
        log.put(Payload(NOON, "r", "search", "x" * 101))
        log.put(Payload(NOON, "r", "search", '{"prompt": "hi"}'))
        until(lambda: log.written == 1)
        log.put(Payload(NOON, "s", "search", "y" * 99))
    assert log.dropped == 1
    assert rows(path, "SELECT request_id, owner, payload FROM payloads") == [
        ("r", "search", '{"prompt": "hi"}'),
        ("s", "search", "y" * 99),
    ]


def test_several_gateways_share_a_log(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with logging_to(path) as one, logging_to(path) as two:
        for _ in range(200):
            one.put(RECORD)
            two.put(RECORD)
    assert len(rows(path)) == 400


def test_what_is_no_usage_log_is_refused(tmp_path: Path) -> None:
    text, other, newer = tmp_path / "text", tmp_path / "other.db", tmp_path / "newer.db"
    text.write_text("these are no pages of a database, but more than a hundred bytes of prose" * 3)
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE usage (id)")
    UsageLog(newer).close()
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("PRAGMA user_version = 3")
    for path, said in (
        (text, "is not a usage log"),
        (other, "another kind of database"),
        (newer, "version 3"),
        (tmp_path, "directory"),
        (tmp_path / "no" / "folder.db", "No such file"),
    ):
        with pytest.raises(UsageLogError, match=said):
            UsageLog(path)
    with pytest.raises(UsageLogError, match="no such file"):
        report(tmp_path / "missing.db")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two owners, and of one adapter in two versions."""
    path = tmp_path_factory.mktemp("usage") / "usage.db"
    day = 86_400.0
    with logging_to(path) as log:
        for record in (
            RECORD,
            replace(RECORD, prompt_tokens=20, first_token_seconds=0.75),
            replace(RECORD, adapter_content="bb" * 16, time=NOON + 2 * day, prompt_tokens=100),
            replace(RECORD, owner="chat", key_id="c", adapter=None, adapter_content="", output_tokens=1000),
            replace(RECORD, owner="chat", key_id="c", status=499, time=NOON + day, first_token_seconds=0.0),
        ):
            log.put(record)
    return path


def test_the_report_says_who_used_which_version(filled: Path) -> None:
    found = report(filled, ["owner", "adapter"])
    assert found.columns[:5] == ["owner", "adapter", "adapter_content", "requests", "failed"]
    assert found.rows == [
        ("chat", None, "", 1, 0, 10, 4, 1000, 0, 0, 0.25, 1.5),
        ("search", "sql", "bb" * 16, 1, 0, 100, 4, 5, 0, 0, 0.25, 1.5),
        ("search", "sql", "aa" * 16, 2, 0, 30, 8, 10, 0, 0, 0.5, 1.5),
        ("chat", "sql", "aa" * 16, 1, 1, 10, 4, 5, 0, 0, None, 1.5),
    ]
    assert [row[:2] for row in report(filled, ["day"], since=NOON + 1).rows] == [("2030-03-19", 1), ("2030-03-18", 1)]
    assert report(filled, ["key"], until=NOON + 1).rows[0][:2] == ("c", 1)
    assert report(filled, []).rows[0][0] == 5 and report(filled, [], since=NOON * 2).rows == []
    with pytest.raises(ValueError, match="grouped by owner"):
        report(filled, ["owner", "time; DROP TABLE usage"])


def test_the_command(filled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["usage", str(filled), "--by", "owner", "--json"]) == 0
    assert [(row["owner"], row["output_tokens"]) for row in json.loads(capsys.readouterr().out)] == [
        ("chat", 1005),
        ("search", 15),
    ]
    assert (
        main(
            ["usage", str(filled), "--by", "owner", "--csv", "--since", "2030-03-18T00:00:00", "--until", "2030-03-19"]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines()[1].startswith("chat,1,1,10,")
    assert main(["usage", str(filled)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["chat", "-", "-"]
    monkeypatch.setenv("XDG_STATE_HOME", str(filled.parent / "none"))
    assert main(["usage", "--since", "1d"]) == 2
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["usage", "--since", "yesterday"])


def test_tokens_of_today_are_read_by_key(filled: Path) -> None:
    with logging_to(filled) as log:
        assert log.tokens_since(NOON + 1) == {"search-1": 105, "c": 15}
