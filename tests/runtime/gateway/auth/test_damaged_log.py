"""A usage log with damaged pages ends no gateway: it is renamed, a new one begins, and whole records can be read."""

import json
import os
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sidestream.runtime.gateway.app import component_values, make_components
from sidestream.runtime.gateway.auth.edit_keys_file import add
from sidestream.runtime.gateway.auth.key_store import Key
from sidestream.runtime.gateway.auth.usage_database import Payload
from sidestream.runtime.gateway.auth.usage_log import UsageLog
from sidestream.runtime.gateway.auth.usage_report import report
from sidestream.runtime.gateway.interfaces import UsageRecord
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.tools.cli import main
from support.gateway import FakeEngines

PAGE = 4096
RECORD = UsageRecord(0.0, "r", "/v1/completions", "search", "k", "llama", "sql", "aa" * 16, 10, 5, 4, 0.25, 1.5, 200)
COUNT = 600


def fill(path: Path, count: int = COUNT) -> None:
    log = UsageLog(path)
    for index in range(count):
        log.put(replace(RECORD, time=time.time(), request_id=str(index)))
        log.put(Payload(time.time(), str(index), "search", "{}"))
    log.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def overwrite(path: Path, start: int, end: int | None = None, seed: int = 0) -> None:
    """Overwrite bytes of the file with random ones."""
    end = path.stat().st_size if end is None else end
    with path.open("r+b") as file:
        file.seek(start)
        file.write(random.Random(seed).randbytes(end - start))


def set_aside(path: Path) -> list[Path]:
    """Return the logs that were renamed."""
    found = path.parent.glob(f"{path.name}.damaged-*")
    return [log for log in found if not log.name.endswith(("-wal", "-shm"))]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def leaf_pages(path: Path) -> list[int]:
    """Return the pages with rows of the table `usage`, in the order of the file (1: the first page)."""
    data, pages = path.read_bytes(), []
    for number in range(2, len(data) // PAGE + 1):
        page = data[(number - 1) * PAGE : number * PAGE]
        if page[0] == 13 and b"/v1/completions" in page:
            pages.append(number)
    return pages


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    path = tmp_path / "usage.db"
    fill(path)
    return path


def test_a_gateway_starts_with_a_new_log_and_says_so(log_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    overwrite(log_path, PAGE)
    keys = log_path.with_name("keys.toml")
    add(keys, Key("k", "", "search", tokens_per_day=10**6))
    parts = make_components(GatewaySettings(keys=str(keys), usage_log=str(log_path)), FakeEngines())
    parts.close()
    (aside,) = set_aside(log_path)
    assert f"{log_path} is damaged; it is now {aside}" in caplog.text
    assert report(log_path, []).rows == [], "a new one"
    log = UsageLog(log_path)
    log.put(replace(RECORD, time=time.time()))
    log.close()
    assert log.written == 1 and report(log_path, ["owner"]).rows[0][:2] == ("search", 1)
    assert log_path.stat().st_mode & 0o777 == 0o600


def test_metrics_count_logs_that_were_set_aside(log_path: Path) -> None:
    whole = UsageLog(log_path)
    whole.close()
    assert component_values(None, whole, None)["usage_log_set_aside_total"] == 0
    overwrite(log_path, PAGE)
    damaged = UsageLog(log_path)
    damaged.close()
    assert component_values(None, damaged, None)["usage_log_set_aside_total"] == 1


@pytest.mark.parametrize("seed", range(8))
def test_no_damage_behind_the_header_ends_a_start_or_loses_a_record(log_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    size = log_path.stat().st_size
    for _ in range(draw.choice([1, 5, 50])):
        start = draw.randrange(100 if seed % 2 else PAGE, size)
        overwrite(log_path, start, min(size, start + draw.choice([1, 100, PAGE])), draw.randrange(1 << 30))
    if seed == 7:
        os.truncate(log_path, size // 2)
    log = UsageLog(log_path)
    log.tokens_since(0.0)
    for index in range(50):
        log.put(replace(RECORD, time=time.time(), request_id=f"later-{index}"))
        log.put(Payload(time.time(), str(index), "search", "{}"))
    log.close(60)
    assert log.dropped == 0 and log.written == 100
    with closing(sqlite3.connect(log_path)) as connection:
        later = connection.execute("SELECT count(*) FROM usage WHERE request_id LIKE 'later-%'").fetchone()
    assert later == (50,)


def test_damage_while_the_gateway_runs_loses_no_record(log_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = UsageLog(log_path)
    overwrite(log_path, PAGE)
    with closing(sqlite3.connect(log_path)) as other:
        other.execute("PRAGMA user_version = 2")  # another gateway writes, so pages in memory are read again
    for index in range(3):
        log.put(replace(RECORD, time=time.time(), request_id=f"later-{index}"))
    log.close(60)
    assert log.written == 3 and log.dropped == 0 and log.set_aside == 1 and not log.problem
    assert report(log_path, []).rows[0][0] == 3
    assert "malformed" in caplog.text and "can be written again" in caplog.text


def test_the_command_sums_up_what_is_whole(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = COUNT // len(leaf_pages(log_path))
    for page in leaf_pages(log_path)[3:5]:
        overwrite(log_path, (page - 1) * PAGE, page * PAGE)
    assert main(["usage", str(log_path), "--by", "owner", "--json"]) == 0
    output = capsys.readouterr()
    assert "the log is damaged" in output.err
    (sums,) = json.loads(output.out)
    assert COUNT - 2.5 * rows < sums["requests"] < COUNT and sums["prompt_tokens"] == 10 * sums["requests"]
    with closing(sqlite3.connect(log_path)) as connection:
        whole = 0
        for identifier in range(1, COUNT + 1):
            with suppress(sqlite3.DatabaseError):
                whole += len(connection.execute("SELECT * FROM usage WHERE id = ?", (identifier,)).fetchall())
    assert sums["requests"] == whole, "each record that can be read alone is counted"


def test_the_command_reads_what_a_gateway_has_set_aside(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = leaf_pages(log_path)[-1]
    overwrite(log_path, (last - 1) * PAGE, last * PAGE)
    log = UsageLog(log_path)
    today = log.tokens_since(time.time() - 3600)
    log.close()
    assert main(["usage", str(set_aside(log_path)[0]), "--by", "key", "--json"]) == 0
    (sums,) = json.loads(capsys.readouterr().out)
    assert COUNT * 0.9 < sums["requests"] < COUNT
    assert today == {"k": 15 * sums["requests"]}, "limits per day still count what can be read"


def test_old_pages_are_found_damaged_when_today_is_counted(log_path: Path) -> None:
    first = leaf_pages(log_path)[0]
    overwrite(log_path, (first - 1) * PAGE, first * PAGE)
    log = UsageLog(log_path)
    assert log.set_aside == 0 and 0 < log.tokens_since(0.0)["k"] < 15 * COUNT
    until(lambda: log.set_aside == 1)
    log.close()


def test_a_damaged_log_of_version_1_is_read(log_path: Path) -> None:
    with closing(sqlite3.connect(log_path)) as connection:
        for column in ("draft_tokens", "accepted_tokens"):
            connection.execute(f"ALTER TABLE usage DROP COLUMN {column}")
        connection.execute("PRAGMA user_version = 1")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    page = leaf_pages(log_path)[1]
    overwrite(log_path, (page - 1) * PAGE, page * PAGE)
    found = report(log_path, ["owner"])
    assert found.damaged and COUNT * 0.9 < found.rows[0][1] < COUNT  # type: ignore[operator]
    assert dict(zip(found.columns, found.rows[0], strict=True))["draft_tokens"] == 0


def test_a_log_without_a_readable_record_has_no_sums(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overwrite(log_path, PAGE)
    assert main(["usage", str(log_path)]) == 0
    output = capsys.readouterr()
    assert "the log is damaged" in output.err and len(output.out.splitlines()) == 1


def test_another_file_is_never_renamed(tmp_path: Path) -> None:
    for name, content in (("notes.txt", b"my notes\n" * 1000), ("photos.db", b"SQLite format 3\0" + b"\1" * 8000)):
        other = tmp_path / name
        other.write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a usage log|is another kind of database"):
            UsageLog(other)
        assert other.read_bytes() == content and set_aside(other) == []
