"""The usage log's columns of drafts: older logs get them and keep their rows, and sums by adapter are what the answers
said.
"""

import json
import re
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway.auth import usage_database
from sidestream.runtime.gateway.auth.usage_database import UsageLogError, open_to_write, tokens_since
from sidestream.runtime.gateway.auth.usage_log import UsageLog
from sidestream.runtime.gateway.auth.usage_report import report
from sidestream.runtime.gateway.interfaces import UsageRecord
from sidestream.tools.cli import main

NOON = 1_900_000_000.0
RECORD = UsageRecord(NOON, "r", "/v1/completions", "search", "search-1", "llama", "sql", "aa", 10, 5, 4, 0.25, 1.5, 200)
FIRST_VERSION = """
CREATE TABLE usage (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, request_id TEXT NOT NULL, endpoint TEXT NOT NULL, owner TEXT NOT NULL,
    key TEXT NOT NULL, model TEXT NOT NULL, adapter TEXT, adapter_content TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    first_token_seconds REAL NOT NULL, total_seconds REAL NOT NULL, status INTEGER NOT NULL, error TEXT NOT NULL
) STRICT;
CREATE INDEX usage_time ON usage (time);
CREATE TABLE payloads (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, request_id TEXT NOT NULL, owner TEXT NOT NULL, payload TEXT NOT NULL
) STRICT;
CREATE INDEX payloads_request ON payloads (request_id);
PRAGMA application_id = 0x53535547;
PRAGMA user_version = 1;
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A log of the first version, with rows."""
    path = tmp_path / "usage.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(FIRST_VERSION)
        for name, adapter in (("a", "sql"), ("b", None)):
            connection.execute(
                "INSERT INTO usage VALUES (NULL, ?, ?, '/v1/completions', 'search', 'search-1', 'llama', ?, 'aa', 10, "
                "5, 4, 0.25, 1.5, 200, '')",
                (NOON, name, adapter),
            )
        connection.execute("INSERT INTO payloads VALUES (NULL, ?, 'a', 'search', '{}')", (NOON,))
        connection.commit()
    return path


def content(path: Path) -> tuple[int, list[tuple[object, ...]], int]:
    """Version, rows of usage, number of payloads."""
    with closing(sqlite3.connect(path)) as connection:
        return (
            connection.execute("PRAGMA user_version").fetchone()[0],
            connection.execute("SELECT * FROM usage ORDER BY id").fetchall(),
            connection.execute("SELECT COUNT(*) FROM payloads").fetchone()[0],
        )


def test_an_older_log_gets_the_columns_and_keeps_its_rows(old: Path, tmp_path: Path) -> None:
    _, before, _ = content(old)
    log = UsageLog(old)
    log.put(replace(RECORD, request_id="c", draft_tokens=9, accepted_tokens=7))
    log.close()
    version, rows, payloads = content(old)
    assert (version, payloads) == (usage_database.VERSION, 1)
    assert rows[:2] == [(*row, 0, 0) for row in before]
    assert rows[2][2] == "c" and rows[2][-2:] == (9, 7)
    UsageLog(tmp_path / "new.db").close()
    schemas = []
    for path in (old, tmp_path / "new.db"):
        with closing(sqlite3.connect(path)) as connection:
            columns = connection.execute("PRAGMA table_info(usage)").fetchall()
            schemas.append(columns)
    assert schemas[0] == schemas[1], "a log that was upgraded is as one that is new"


def test_an_older_log_is_read_as_it_is(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bytes_before = old.read_bytes()
    assert main(["usage", str(old), "--by", "adapter", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["adapter"], row["output_tokens"], row["draft_tokens"], row["accepted_tokens"]) for row in told] == [
        (None, 5, 0, 0),
        ("sql", 5, 0, 0),
    ]
    connection = usage_database.open_to_read(old)
    assert tokens_since(connection, 0.0) == {"search-1": 30}
    connection.close()
    assert old.read_bytes() == bytes_before


def test_gateways_that_open_an_older_log_together_upgrade_it_once(old: Path) -> None:
    barrier, problems = threading.Barrier(6), []

    def open_it() -> None:
        barrier.wait()
        try:
            open_to_write(old).close()
        except (sqlite3.Error, UsageLogError) as error:
            problems.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    version, rows, _ = content(old)
    assert not problems and version == usage_database.VERSION and len(rows) == 2


def test_an_upgrade_that_fails_leaves_the_log_as_it_was(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, before, _ = content(old)
    monkeypatch.setattr(usage_database, "_UPGRADE", (*usage_database._UPGRADE[:2], "ALTER TABLE nothing ADD COLUMN x"))
    with pytest.raises(sqlite3.OperationalError):
        open_to_write(old)
    assert content(old)[:2] == (1, before)


def test_the_report_sums_drafts_by_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "usage.db"
    log = UsageLog(path)
    for adapter, drafted, accepted in (("sql", 10, 7), ("sql", 4, 0), (None, 5, 1)):
        log.put(replace(RECORD, adapter=adapter, draft_tokens=drafted, accepted_tokens=accepted))
    log.close()
    assert main(["usage", str(path), "--by", "adapter", "--csv"]) == 0
    header, *lines = (line.split(",") for line in capsys.readouterr().out.splitlines())
    place = header.index("draft_tokens")
    assert header[place + 1] == "accepted_tokens"
    assert [(line[0], *line[place : place + 2]) for line in lines] == [("sql", "14", "7"), ("", "5", "1")]
    assert main(["usage", str(path), "--by", "adapter"]) == 0
    table = capsys.readouterr().out
    assert "draft_tokens" in table and re.search(r"^sql .* 14 +7 ", table, re.MULTILINE)


def drafts_by_adapter(path: Path) -> tuple[int, dict[Any, tuple[int, int]]]:
    """Requests of the log, and by adapter its drafts and those of them that were accepted."""
    found = report(path, ["adapter"])
    rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
    return sum(row["requests"] for row in rows), {
        row["adapter"]: (row["draft_tokens"], row["accepted_tokens"]) for row in rows
    }


def is_written(path: Path, request_id: str) -> bool:
    with closing(sqlite3.connect(path)) as connection:
        return bool(connection.execute("SELECT 1 FROM usage WHERE request_id = ?", (request_id,)).fetchall())


def test_sums_by_adapter_are_what_the_answers_said(served: Any) -> None:
    path = served.directory / "usage.db"
    last = {"prompt": "x", "max_tokens": 1}
    httpx.post(f"{served.url}/v1/completions", json=last, headers={"X-Request-Id": "last"}, timeout=60)
    while not is_written(path, "last"):  # after those of other tests
        time.sleep(0.05)
    requests, before = drafts_by_adapter(path)
    asked = {"prompt": "one two three one two three one two", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    said: dict[str | None, tuple[int, int]] = {}
    for adapter, options in (("pirate", {}), ("pirate", {"speculation": 1}), (None, {}), ("pirate", {"n": 2})):
        body = {**asked, **options, "model": adapter or "demo_model"}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
        details = answer["usage"]["completion_tokens_details"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        drafted_so_far, accepted_so_far = said.get(adapter, (0, 0))
        said[adapter] = drafted_so_far + accepted + rejected, accepted_so_far + accepted
    while drafts_by_adapter(path)[0] < requests + 4:
        time.sleep(0.05)
    after = drafts_by_adapter(path)[1]
    for adapter, (drafted, accepted) in said.items():
        drafted_before, accepted_before = before.get(adapter, (0, 0))
        assert after[adapter] == (drafted_before + drafted, accepted_before + accepted)
        assert drafted > 0
    assert said["pirate"][1] > 0
