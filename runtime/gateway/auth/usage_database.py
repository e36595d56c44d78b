"""SQLite database of the usage log: the table `usage` has a row per request, and `payloads` prompts and answers."""

import os
import sqlite3
import stat
from collections.abc import Iterable
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


@dataclass(frozen=True)
class Payload:
    """Prompts and answers of a request as JSON."""

    time: float
    request_id: str
    owner: str
    payload: str


def open_to_write(path: Path) -> sqlite3.Connection:
    """Open the log for writing. Creates it with mode 0600, or adds missing columns to an older version.

    Several processes of one machine may write to a log. A record survives the end of its process; a power failure may
    lose the last ones. Raises UsageLogError, or sqlite3.Error if the disk is full.
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
    except sqlite3.DatabaseError as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise UsageLogError(f"{path} is not a usage log: {error}") from None
    except UsageLogError:
        connection.close()
        raise
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open the log for reading, also while gateways write to it. Missing columns of an older version read as 0.

    Raises UsageLogError.
    """
    if not path.is_file():
        raise UsageLogError(f"{path}: no such file; give the gateway's usage log")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    try:
        if check(connection, path) < VERSION:
            connection.execute(_READ_OLD)
    except (sqlite3.Error, UsageLogError) as error:
        connection.close()
        raise UsageLogError(str(error) if isinstance(error, UsageLogError) else f"{path}: {error}") from None
    return connection


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


def _is_empty(connection: sqlite3.Connection) -> bool:
    count: int = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    return count == 0
