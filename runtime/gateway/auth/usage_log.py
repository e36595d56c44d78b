"""Writes usage records, and prompts and answers if requested, to SQLite in a thread, so a slow disk delays no request.

If the disk is full or fails, records wait in a bounded queue. Records that do not fit are dropped and counted, with a
warning and a metric; requests continue. A log with damaged pages is renamed, and a new one replaces it.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...protocol.messages import Chunk
from ..interfaces import AdmittedRequest, UsageRecord
from ..metrics.observers import BaseObserver
from .usage_database import (
    Payload,
    UsageLogError,
    delete_old,
    is_damage,
    open_or_set_aside,
    open_to_read,
    tokens_since,
    use_readable_rows,
    write,
)

MAX_CHARACTERS = 1 << 20
MAX_QUEUED = 65536
MAX_QUEUED_PAYLOAD = 64 << 20  # characters
BATCH = 1024
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 5.0
DAY_SECONDS = 86400.0
DELETE_SECONDS = 600.0
"""Interval of searches for records older than `days`."""

_encode = msgspec.json.Encoder().encode
logger = logging.getLogger("sidestream.gateway")


class UsageLog(BaseObserver):
    """Writes the records of finished requests. `put` does not block, and may be called from any thread.

    days               age at which records are deleted; None: never
    written, dropped   number of records since the start
    set_aside          number of damaged logs that were renamed since the start
    problem            why records cannot be written now, "" if they can

    Raises UsageLogError for a path that is not a usage log and cannot become one.
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
        self.set_aside = 0
        self.problem = ""
        self._days, self._wall = days, wall
        self._next_delete = 0.0
        self._max_queued = max_queued
        self._retry_seconds = retry_seconds
        self._queue: deque[UsageRecord | Payload] = deque()
        self._payload_bytes = 0
        self._one_by_one = 0
        self._changed = threading.Condition()
        self._closing = False
        self._connection: sqlite3.Connection | None = None
        self._damaged = False
        self._aside: Path | None = None
        try:
            self._open()
        except sqlite3.OperationalError as error:
            self._failed(error)
        self._thread = threading.Thread(target=self._run, name="sidestream-usage", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Number of records in the queue."""
        return len(self._queue)

    def tokens_since(self, time: float) -> dict[str, int]:
        """Return key name -> tokens in the log since `time` (seconds since the epoch); empty if it cannot be read."""
        try:
            path = self._aside or self.path
            connection = open_to_read(path)
            try:
                return tokens_since(connection, time)
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                use_readable_rows(connection, path)
                tokens = tokens_since(connection, time)
                with self._changed:  # the thread renames it
                    self._damaged = self._aside is None
                    self._changed.notify()
                return tokens
            finally:
                connection.close()
        except (sqlite3.Error, UsageLogError) as error:
            logger.warning("today's tokens are counted from 0: %s", error)
            return {}

    def on_finished(self, request: AdmittedRequest, record: UsageRecord) -> None:
        self.put(record)

    def put(self, record: UsageRecord | Payload) -> None:
        """Enqueue a record."""
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
        """Write queued records and stop. After `seconds` the rest is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        if self._queue:
            self.dropped += len(self._queue)
            logger.warning("%d usage records were not written: %s", len(self._queue), self.problem or "too slow")

    def _run(self) -> None:
        while self._wait_for_records():
            self._delete_old()
            count = 1 if self._one_by_one else min(BATCH, len(self._queue))
            batch = [self._queue[index] for index in range(count)]
            try:
                self._open()
                if self._connection is not None and batch:
                    write(self._connection, batch)
            except (sqlite3.OperationalError, OSError, UsageLogError) as error:
                self._failed(error)
                if not self._wait_to_retry():
                    break
            except (sqlite3.Error, ValueError, OverflowError) as error:
                if is_damage(error):
                    repeated, self._damaged = bool(self.problem), True
                    self._failed(error)
                    if repeated and not self._wait_to_retry():
                        break
                elif count == 1:  # an invalid record must not block the others
                    logger.warning("dropped a usage record: %s", error)
                    self._remove(batch)
                    self.dropped += 1
                else:
                    self._one_by_one = count
            else:
                self._remove(batch)
                self.written += count
                if self.problem:
                    self.problem = ""
                    logger.warning("the usage log can be written again")
        if self._connection is not None:
            self._connection.close()

    def _open(self) -> None:
        """Open the log, unless it is open and whole. Raises like `open_to_write`."""
        if self._connection is not None and not self._damaged:
            return
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._connection, aside = open_or_set_aside(self.path, check_pages=self._damaged)
        self._damaged = False
        if aside is not None:
            self._aside = aside
            self.set_aside += 1
            logger.warning(
                "the usage log %s is damaged; it is now %s, whose readable records `sidestream usage` shows, and a new "
                "log begins",
                self.path,
                aside,
            )

    def _wait_for_records(self) -> bool:
        with self._changed:
            while not self._queue and not self._closing and not self._damaged:
                if not self._changed.wait(None if self._days is None else self._next_delete - time.monotonic()):
                    return True
            return bool(self._queue) or (self._damaged and not self._closing)

    def _delete_old(self) -> None:
        """Delete a batch of old records, so that new ones are written in between."""
        if self._days is None or time.monotonic() < self._next_delete:
            return
        deleted = 0
        try:
            if self._connection is not None:
                deleted = delete_old(self._connection, self._wall() - self._days * DAY_SECONDS, BATCH)
        except sqlite3.Error as error:
            self._damaged = self._damaged or is_damage(error)
            logger.warning("old usage records could not be deleted: %s", error)
        self._next_delete = time.monotonic() + (0.0 if deleted else DELETE_SECONDS)

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
            remedy = "free disk space" if "full" in problem else "check its disk and its permissions"
            logger.warning(
                "the usage log %s cannot be written, and its records wait: %s; %s", self.path, problem, remedy
            )
        self.problem = problem


def _size(record: UsageRecord | Payload) -> int:
    return len(record.payload) if isinstance(record, Payload) else 0


class PayloadLog(BaseObserver):
    """Writes prompts and answers, up to MAX_CHARACTERS of each, as JSON (`--log-payloads`).

    The fields are `prompts` (texts or token ids), `answers` (per prompt, completions by index) and `truncated`.
    """

    def __init__(self, log: UsageLog) -> None:
        self._log = log
        self._answers: dict[int, _AnswerTexts] = {}

    def on_admitted(self, request: AdmittedRequest) -> None:
        self._answers[id(request)] = _AnswerTexts()

    def on_chunks(self, request: AdmittedRequest, prompt_index: int, chunks: list[Chunk], seconds: float) -> None:
        answers = self._answers.get(id(request))
        if answers is not None:
            answers.add(prompt_index, chunks)

    def on_finished(self, request: AdmittedRequest, record: UsageRecord) -> None:
        answers = self._answers.pop(id(request), None) or _AnswerTexts()
        prompts: list[str | list[int]] = []
        characters_left = MAX_CHARACTERS
        for prompt in request.prompts:
            prompts.append(prompt[: max(0, characters_left)])
            characters_left -= len(prompt)
        texts: list[dict[str, str]] = [{} for _ in prompts]
        for (prompt_index, index), parts in answers.texts.items():
            texts[prompt_index][str(index)] = "".join(parts)
        payload = {
            "model": request.model,
            "prompts": prompts,
            "answers": texts,
            "truncated": answers.characters_left < 0 or characters_left < 0,
        }
        text = _encode(payload).decode("utf-8", "replace")
        self._log.put(Payload(request.started, request.request_id, request.caller.owner, text))


class _AnswerTexts:
    def __init__(self) -> None:
        self.texts: dict[tuple[int, int], list[str]] = {}
        self.characters_left = MAX_CHARACTERS

    def add(self, prompt_index: int, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            text = chunk.text[: max(0, self.characters_left)]
            self.characters_left -= len(chunk.text)
            if text:
                self.texts.setdefault((prompt_index, chunk.index), []).append(text)
