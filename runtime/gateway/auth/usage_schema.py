"""The usage log's database: one row a request in the table `usage`, and with payloads a table of these."""

import os
import sqlite3
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..contracts import UsageRecord

VERSION = 2
"""1 had no columns of drafts."""
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
_ADD_USAGE = f"INSERT INTO usage VALUES (NULL, {', '.join('?' * 17)})"
_ADD_PAYLOAD = "INSERT INTO payloads VALUES (NULL, ?, ?, ?, ?)"


def default_path() -> Path:
    """Where the log lies by default: `$XDG_STATE_HOME/sidestream/usage.db`, where ~/.local/state is XDG's default."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "sidestream" / "usage.db"


class UsageLogError(ValueError):
    """A file is no usage log, or cannot be opened; the text names it and the remedy."""


@dataclass(frozen=True)
class Payload:
    """What was asked and answered, as JSON; kept only where it was asked for."""

    time: float
    request_id: str
    owner: str
    payload: str


def open_to_write(path: Path) -> sqlite3.Connection:
    """The log, made with mode 0600 where there is none; one of an older version gets the columns that it lacks, and
    keeps its rows. Raises UsageLogError, or sqlite3.Error for a disk that is full.

    Several processes of one machine may write to one log. A record that was written survives the end of a process; a
    loss of power may take the last ones.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise UsageLogError(f"{path}: {error.strerror}; name a file for the usage log that can be written") from None
    if not regular:
        raise UsageLogError(f"{path} is no regular file; name a file for the usage log")
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
                if _is_empty(connection):  # nobody else made it meanwhile
                    raise
        if check(connection, path) < VERSION:
            _upgrade(connection)
    except sqlite3.DatabaseError as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise UsageLogError(f"{path} is no usage log: {error}") from None
    except UsageLogError:
        connection.close()
        raise
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """The log, also while gateways write to it. One of an older version is not changed, and what its rows lack is 0.

    Raises UsageLogError.
    """
    if not path.is_file():
        raise UsageLogError(f"{path}: there is no such file; name the gateway's usage log")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    try:
        if check(connection, path) < VERSION:
            connection.execute(_READ_OLD)
    except (sqlite3.Error, UsageLogError) as error:
        connection.close()
        raise UsageLogError(str(error) if isinstance(error, UsageLogError) else f"{path}: {error}") from None
    return connection


def check(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the log. Raises UsageLogError for a database of something else, or of a version not known here."""
    application, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    if application != APPLICATION:
        raise UsageLogError(f"{path} is a database of something else; name another file for the usage log")
    if not 1 <= version <= VERSION:
        raise UsageLogError(
            f"{path} is version {version} of the usage log, and this Sidestream knows versions up to {VERSION}; name "
            "another file"
        )
    return version


def write(connection: sqlite3.Connection, records: Iterable[UsageRecord | Payload]) -> None:
    """All of these or none. Raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for record in records:
            connection.execute(*_row(record))
        connection.execute("COMMIT")
    except (sqlite3.Error, ValueError, OverflowError):
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def forget(connection: sqlite3.Connection, before: float, at_most: int) -> int:
    """Deletes at most so many rows of either table from before a time, in seconds since the epoch; how many these were.

    Raises sqlite3.Error.
    """
    return sum(
        connection.execute(
            f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE time < ? LIMIT ?)", (before, at_most)
        ).rowcount
        for table in ("usage", "payloads")
    )


def tokens_since(connection: sqlite3.Connection, time: float) -> dict[str, int]:
    """Tokens of each key's requests that came at or after `time`, in seconds since the epoch, by the key's name."""
    return dict(
        connection.execute(
            "SELECT key, SUM(prompt_tokens + output_tokens) FROM usage WHERE time >= ? AND key <> '' GROUP BY key",
            (time,),
        )
    )


def _row(record: UsageRecord | Payload) -> tuple[str, tuple[object, ...]]:
    if isinstance(record, Payload):
        return _ADD_PAYLOAD, (record.time, record.request_id, record.owner, record.payload)
    return _ADD_USAGE, (
        record.time,
        record.request_id,
        record.endpoint,
        record.owner,
        record.key_id,
        record.model,
        record.adapter,
        record.adapter_content,
        record.prompt_tokens,
        record.output_tokens,
        record.cached_tokens,
        record.first_token_seconds,
        record.total_seconds,
        record.status,
        record.error,
        record.draft_tokens,
        record.accepted_tokens,
    )


def _upgrade(connection: sqlite3.Connection) -> None:
    """All of it or nothing; once, also where several processes open the log at the same time."""
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
    found: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return found


def _is_empty(connection: sqlite3.Connection) -> bool:
    found: int = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    return found == 0
