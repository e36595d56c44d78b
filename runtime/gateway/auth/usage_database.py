"""SQLite database of the usage log: the table `usage` has a row per request, and `payloads` prompts and answers."""

import fcntl
import itertools
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..interfaces import UsageRecord

VERSION = 2
"""Version 1 had no columns of draft tokens."""
APPLICATION = 0x53535547  # "SSUG"
BUSY_SECONDS = 5.0
_CREATE = f"""
BEGIN IMMEDIATE;
CREATE TABLE usage (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    request_id TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    model TEXT NOT NULL,
    adapter TEXT,
    adapter_content TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    first_token_seconds REAL NOT NULL,
    total_seconds REAL NOT NULL,
    status INTEGER NOT NULL,
    error TEXT NOT NULL,
    draft_tokens INTEGER NOT NULL DEFAULT 0,
    accepted_tokens INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX usage_time ON usage (time);
CREATE TABLE payloads (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    request_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    payload TEXT NOT NULL
) STRICT;
CREATE INDEX payloads_request ON payloads (request_id);
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
COMMIT;
"""
_UPGRADE = (
    "ALTER TABLE usage ADD COLUMN draft_tokens INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE usage ADD COLUMN accepted_tokens INTEGER NOT NULL DEFAULT 0",
    f"PRAGMA user_version = {VERSION}",
)
_READ_OLD = "CREATE TEMP VIEW usage AS SELECT *, 0 AS draft_tokens, 0 AS accepted_tokens FROM main.usage"
_NEWEST = (
    "SELECT * FROM usage ORDER BY id DESC LIMIT 1",
    "SELECT time FROM usage ORDER BY time DESC LIMIT 1",
    "SELECT id, time FROM payloads ORDER BY id DESC LIMIT 1",
)
"""Queries that read the pages to which the next records are written."""
CACHE_KIB = 256
"""Memory of the writer's page cache. It appends; SQLite's default of 2 MB would fill over thousands of requests."""
MAX_ROWID = 1 << 62
EXACT_SKIP = 1024
_CREATE_COPY = """
CREATE TEMP TABLE readable AS SELECT * FROM usage WHERE 0;
DROP VIEW IF EXISTS temp.usage;
ALTER TABLE temp.readable RENAME TO usage;
"""
_TYPES: tuple[type | tuple[type, ...], ...]
_TYPES = (int, float, *[str] * 5, (str, type(None)), str, *[int] * 3, float, float, int, str, int, int)
"""Types of the columns of `usage`."""
_FIELDS = (
    *("time", "request_id", "endpoint", "owner", "key_id", "model", "adapter", "adapter_content"),
    *("prompt_tokens", "output_tokens", "cached_tokens", "first_token_seconds", "total_seconds"),
    *("status", "error", "draft_tokens", "accepted_tokens"),
)
"""Fields of UsageRecord in the order of the table's columns."""
_ADD_USAGE = f"INSERT INTO usage VALUES (NULL, {', '.join('?' * len(_FIELDS))})"
_ADD_PAYLOAD = "INSERT INTO payloads VALUES (NULL, ?, ?, ?, ?)"


def default_path() -> Path:
    """Return the default path: `$XDG_STATE_HOME/sidestream/usage.db` (XDG_STATE_HOME is ~/.local/state by default)."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "sidestream" / "usage.db"


class UsageLogError(ValueError):
    """A file is not a usage log, or cannot be opened. The message explains the remedy."""


class DamagedLogError(UsageLogError):
    """A usage log has damaged pages."""


@dataclass(frozen=True)
class Payload:
    """Prompts and answers of a request as JSON."""

    time: float
    request_id: str
    owner: str
    payload: str


def open_to_write(path: Path, check_pages: bool = False) -> sqlite3.Connection:
    """Open the log for writing. Creates it with mode 0600, or adds missing columns to an older version.

    Several processes of one machine may write to a log. A record survives the end of its process; a power failure may
    lose the last ones. Raises UsageLogError, DamagedLogError if pages are damaged, or sqlite3.Error if the disk is
    full.

    check_pages   read all pages, not only those with the newest records
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise UsageLogError(f"{path}: {error.strerror}; choose a writable file for the usage log") from None
    if not regular:
        raise UsageLogError(f"{path} is not a regular file; choose another file for the usage log")
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        if _is_empty(connection):
            try:
                connection.executescript(_CREATE)
            except sqlite3.OperationalError:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if _is_empty(connection):  # no other process has created it meanwhile
                    raise
        if check(connection, path) < VERSION:
            _upgrade(connection)
        for query in _NEWEST:
            connection.execute(query).fetchall()
        if check_pages and (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise DamagedLogError(f"{path} is damaged: {found}")
    except sqlite3.DatabaseError as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError):
            raise
        if is_damage(error) and _has_header(path):
            raise DamagedLogError(f"{path} is damaged: {error}") from None
        raise UsageLogError(
            f"{path} is not a usage log: {error}; move it away, or choose another file for the usage log"
        ) from None
    except UsageLogError:
        connection.close()
        raise
    return connection


def open_or_set_aside(path: Path, check_pages: bool = False) -> tuple[sqlite3.Connection, Path | None]:
    """Open the log like `open_to_write`. A damaged one is renamed and replaced.

    Returns the connection and the new path of a damaged log; None: the log is not damaged. Raises like `open_to_write`.
    """
    try:
        return open_to_write(path, check_pages), None
    except DamagedLogError:
        pass
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # another gateway may replace the same log
        try:
            return open_to_write(path, check_pages), None
        except DamagedLogError:
            return _set_aside(path)
    finally:
        os.close(folder)


def _set_aside(path: Path) -> tuple[sqlite3.Connection, Path]:
    base = f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
    names = (path.with_name(base + (f"-{number}" if number else "")) for number in itertools.count())
    aside = next(name for name in names if not name.exists())
    try:
        for suffix in ("-wal", "-shm", ""):  # the log itself last: a new one must not find the old one's changes
            if os.path.exists(f"{path}{suffix}"):
                os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    except OSError as error:
        raise UsageLogError(f"{path} is damaged, and cannot be renamed: {error.strerror}; move it away") from None
    return open_to_write(path), aside


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open the log for reading, also while gateways write to it. Missing columns of an older version read as 0.

    Raises UsageLogError.
    """
    if not path.is_file():
        raise UsageLogError(f"{path}: no such file; give the gateway's usage log")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    try:
        if check(connection, path) < VERSION:
            connection.execute(_READ_OLD)
    except (sqlite3.Error, UsageLogError) as error:
        connection.close()
        raise UsageLogError(str(error) if isinstance(error, UsageLogError) else f"{path}: {error}") from None
    return connection


def is_damage(error: Exception) -> bool:
    """Return whether an error of SQLite says that the file is damaged."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def use_readable_rows(connection: sqlite3.Connection, path: Path) -> None:
    """Let queries of a damaged log read a copy of the rows that are whole. Raises UsageLogError or sqlite3.Error."""
    connection.executescript(_CREATE_COPY)
    reader = open_to_read(path)  # an error of a query ends all statements of its connection
    try:
        places = ", ".join("?" * len(_TYPES))
        connection.executemany(f"INSERT INTO temp.usage VALUES ({places})", _readable_rows(reader))
    finally:
        reader.close()


def _readable_rows(connection: sqlite3.Connection) -> Iterator[tuple[object, ...]]:
    """Yield the rows that can be read and have values of the right types, without the index."""
    query = "SELECT * FROM main.usage NOT INDEXED WHERE id >= ? ORDER BY id LIMIT ?"
    last, start, limit = 0, 1, -1
    while start < MAX_ROWID:
        try:
            rows = 0
            for row in connection.execute(query, (start, limit)):
                rows += 1
                filled = (*row, *[0] * (len(_TYPES) - len(row)))
                if start <= row[0] and all(isinstance(value, kind) for value, kind in zip(filled, _TYPES, strict=True)):
                    last, start = row[0], row[0] + 1
                    yield filled
                elif limit == 1:
                    start += 1
            if limit < 0 or not rows:
                return
            limit = -1
        except sqlite3.DatabaseError:
            if limit < 0:
                limit = 1  # sqlite3 reads one row ahead, and drops a row if the next one cannot be read
            else:  # skip row by row, so that no whole row is missed, and in larger and larger steps if much is damaged
                skipped = start - last
                start += 1 if skipped < EXACT_SKIP else skipped // 8


def check(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of the log. Raises UsageLogError for another database or an unknown version."""
    application, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    if application != APPLICATION:
        raise UsageLogError(f"{path} is another kind of database; choose another file for the usage log")
    if not 1 <= version <= VERSION:
        raise UsageLogError(
            f"{path} is version {version} of the usage log, and this Sidestream supports versions up to {VERSION}; "
            "choose another file"
        )
    return version


def write(connection: sqlite3.Connection, records: Iterable[UsageRecord | Payload]) -> None:
    """Write all records in one transaction. Raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for record in records:
            connection.execute(*_row(record))
        connection.execute("COMMIT")
    except (sqlite3.Error, ValueError, OverflowError):
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def delete_old(connection: sqlite3.Connection, before: float, limit: int) -> int:
    """Delete up to `limit` rows per table that are older than `before` (seconds since the epoch). Returns their number.

    Raises sqlite3.Error.
    """
    return sum(
        connection.execute(
            f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE time < ? LIMIT ?)", (before, limit)
        ).rowcount
        for table in ("usage", "payloads")
    )


def tokens_since(connection: sqlite3.Connection, time: float) -> dict[str, int]:
    """Return key name -> tokens of its requests since `time` (seconds since the epoch)."""
    return dict(
        connection.execute(
            "SELECT key, SUM(prompt_tokens + output_tokens) FROM usage WHERE time >= ? AND key <> '' GROUP BY key",
            (time,),
        )
    )


def _row(record: UsageRecord | Payload) -> tuple[str, tuple[object, ...]]:
    if isinstance(record, Payload):
        return _ADD_PAYLOAD, (record.time, record.request_id, record.owner, record.payload)
    return _ADD_USAGE, tuple(getattr(record, name) for name in _FIELDS)


def _upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade the schema in one transaction. Safe if several processes open the log at the same time."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _pragma(connection, "user_version") < VERSION:
            for statement in _UPGRADE:
                connection.execute(statement)
        connection.execute("COMMIT")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def _has_header(path: Path) -> bool:
    """Return whether the file begins as a usage log does."""
    with path.open("rb") as file:
        header = file.read(72)
    return header.startswith(b"SQLite format 3\0") and header[68:] == APPLICATION.to_bytes(4, "big")


def _is_empty(connection: sqlite3.Connection) -> bool:
    count: int = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    return count == 0
