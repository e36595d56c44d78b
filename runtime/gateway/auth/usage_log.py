"""Writes a record of every request to SQLite, in a thread of its own: a slow disk slows no request.

When the disk is full or fails, records wait in a queue of bounded length and are written when there is room again; the
queue's oldest stay, and what no longer fits is dropped and counted. That is a warning and a metric; requests go on.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ..contracts import UsageRecord
from .usage_schema import Payload, UsageLogError, forget, open_to_read, open_to_write, tokens_since, write

MAX_QUEUED = 65536
MAX_QUEUED_PAYLOAD = 64 << 20  # characters
BATCH = 1024
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 5.0
DAY_SECONDS = 86400.0
FORGET_SECONDS = 600.0
"""So often what is older than `days` is looked for."""

logger = logging.getLogger("sidestream.gateway")


class UsageLog:
    """The log of a gateway process. `put` returns at once and may be called by any thread.

    days               what is older is deleted; None: nothing is
    written, dropped   records since the start
    problem            why records are not written now, "" when they are

    Raises UsageLogError for a path that is no usage log and cannot become one.
    """

    def __init__(
        self,
        path: Path,
        *,
        days: int | None = None,
        max_queued: int = MAX_QUEUED,
        retry_seconds: float = RETRY_SECONDS,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.written = 0
        self.dropped = 0
        self.problem = ""
        self._days, self._wall = days, wall
        self._forget_at = 0.0
        self._max_queued = max_queued
        self._retry_seconds = retry_seconds
        self._queue: deque[UsageRecord | Payload] = deque()
        self._payload_bytes = 0
        self._one_by_one = 0
        self._changed = threading.Condition()
        self._closing = False
        self._connection: sqlite3.Connection | None = None
        try:
            self._connection = open_to_write(path)
        except sqlite3.OperationalError as error:
            self._failed(error)
        self._thread = threading.Thread(target=self._run, name="sidestream-usage", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Records that wait to be written."""
        return len(self._queue)

    def tokens_since(self, time: float) -> dict[str, int]:
        """Tokens by key since `time`, in seconds since the epoch, of what is written; none when it cannot be read."""
        try:
            connection = open_to_read(self.path)
        except UsageLogError as error:
            logger.warning("tokens of today are counted from now on: %s", error)
            return {}
        try:
            return tokens_since(connection, time)
        finally:
            connection.close()

    def put(self, record: UsageRecord | Payload) -> None:
        """Have a record written."""
        size = _size(record)
        with self._changed:
            full = len(self._queue) >= self._max_queued
            if full or self._closing or (size and self._payload_bytes + size > MAX_QUEUED_PAYLOAD):
                self.dropped += 1
                return
            self._queue.append(record)
            self._payload_bytes += size
            self._changed.notify()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what is queued and end; after `seconds` what is left is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        if self._queue:
            self.dropped += len(self._queue)
            logger.warning("%d records of usage were not written: %s", len(self._queue), self.problem or "too slow")

    def _run(self) -> None:
        while self._wait_for_records():
            self._forget()
            if not self._queue:
                continue
            count = 1 if self._one_by_one else min(BATCH, len(self._queue))
            batch = [self._queue[index] for index in range(count)]
            try:
                if self._connection is None:
                    self._connection = open_to_write(self.path)
                write(self._connection, batch)
            except (sqlite3.OperationalError, OSError, UsageLogError) as error:
                self._failed(error)
                if not self._wait_to_retry():
                    break
            except (sqlite3.Error, ValueError, OverflowError) as error:
                # a record that no disk would take must not hold up the others
                if count == 1:
                    logger.warning("a record of usage is dropped: %s", error)
                    self._remove(batch)
                    self.dropped += 1
                else:
                    self._one_by_one = count
            else:
                self._remove(batch)
                self.written += count
                if self.problem:
                    self.problem = ""
                    logger.warning("the usage log is written again")
        if self._connection is not None:
            self._connection.close()

    def _wait_for_records(self) -> bool:
        with self._changed:
            while not self._queue and not self._closing:
                if not self._changed.wait(None if self._days is None else self._forget_at - time.monotonic()):
                    return True
            return bool(self._queue)

    def _forget(self) -> None:
        """Delete what is too old, a part at a time, so that records are written in between."""
        if self._days is None or time.monotonic() < self._forget_at:
            return
        found = 0
        try:
            if self._connection is not None:
                found = forget(self._connection, self._wall() - self._days * DAY_SECONDS, BATCH)
        except sqlite3.Error as error:
            logger.warning("old records of usage could not be deleted: %s", error)
        self._forget_at = time.monotonic() + (0.0 if found else FORGET_SECONDS)

    def _wait_to_retry(self) -> bool:
        with self._changed:
            return not self._changed.wait_for(lambda: self._closing, self._retry_seconds)

    def _remove(self, batch: list[UsageRecord | Payload]) -> None:
        with self._changed:
            for record in batch:
                self._queue.popleft()
                self._payload_bytes -= _size(record)
            self._one_by_one = max(0, self._one_by_one - len(batch))

    def _failed(self, error: Exception) -> None:
        problem = str(error) or type(error).__name__
        if problem != self.problem:
            remedy = "free space there" if "full" in problem else "look at its disk and its permissions"
            logger.warning("the usage log %s cannot be written, its records wait: %s; %s", self.path, problem, remedy)
        self.problem = problem


def _size(record: UsageRecord | Payload) -> int:
    return len(record.payload) if isinstance(record, Payload) else 0
