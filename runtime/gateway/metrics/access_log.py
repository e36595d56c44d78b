"""A line of JSON for each HTTP request, written by a thread of its own: a slow disk or pipe slows no request."""

import logging
import queue
import sys
import time
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path

import msgspec

from ..contracts import Exchange, HttpAnswer, UsageRecord
from .listener import Listener

MAX_QUEUED = 16384
MAX_PATH = 512
CLOSING_SECONDS = 5.0
"""For what is queued at the end. A pipe that nobody reads takes nothing, however long one waits."""
_encode = msgspec.json.Encoder().encode


class AccessLog(Listener):
    """Writes to a file, or to stdout for None. A file that was moved away is made again, so that
    logrotate can do its work. Lines that do not fit into the queue, or fail to be written, are dropped and counted.

    Raises OSError for a file that cannot be opened.
    """

    def __init__(self, path: Path | None, max_queued: int = MAX_QUEUED) -> None:
        target = _Target() if path is None else _FileTarget(path)
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(max_queued)
        self._target, self._handler = target, _Bounded(self._lines)
        self._listener = _Writer(self._lines, target)
        self._listener.start()
        self._records: dict[str, list[UsageRecord]] = {}

    @property
    def dropped(self) -> int:
        """Lines that were not written."""
        return self._handler.dropped + self._target.failed

    def close(self) -> None:
        """Write what is queued, and end. What is not taken within CLOSING_SECONDS is dropped."""
        if self._listener.ended_within(CLOSING_SECONDS):
            self._target.close()
        else:
            self._handler.dropped += self._lines.qsize()

    def finished(self, exchange: Exchange, record: UsageRecord) -> None:
        """See `Observer`. The line comes when the answer is complete."""
        self._records.setdefault(record.request_id, []).append(record)

    def answered(self, answer: HttpAnswer) -> None:
        """See `Observer`."""
        line = {
            "time": datetime.fromtimestamp(answer.time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "request_id": answer.request_id,
            "client": answer.client_host,
            "owner": answer.owner,
            "method": answer.method,
            "path": answer.path[:MAX_PATH].encode("utf-8", "replace").decode(),
            "status": answer.status,
            "seconds": round(answer.seconds, 6),
            "bytes": answer.body_bytes,
        }
        records = self._records.pop(answer.request_id, None)
        if records:
            record = records.pop()
            if records:  # several open requests have one id: their client chose it
                self._records[answer.request_id] = records
            line |= {
                "key": record.key_id,
                "model": record.model,
                "adapter": record.adapter,
                "prompt_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
                "cached_tokens": record.cached_tokens,
                "first_token_seconds": round(record.first_token_seconds, 6),
                "error": record.error,
            }
        self._handler.emit(logging.makeLogRecord({"msg": _encode(line).decode()}))


class _Bounded(QueueHandler):
    """Drops what does not fit, and counts it."""

    dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class _Writer(QueueListener):
    """The thread that takes lines from the queue. `stop` of its own raises where the queue is full."""

    def ended_within(self, seconds: float) -> bool:
        """Have it write all that is queued and end; False where it still writes after so long."""
        deadline, thread = time.monotonic() + seconds, self._thread
        while thread is not None:
            try:
                self.enqueue_sentinel()
                break
            except queue.Full:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.005)
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
        self._thread = None
        return True


class _Target(logging.StreamHandler):
    """stdout; counts what fails."""

    failed = 0

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def handleError(self, record: logging.LogRecord) -> None:
        self.failed += 1


class _FileTarget(WatchedFileHandler):
    """A file; counts what fails."""

    failed = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        self.failed += 1

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file was moved away and cannot be made again
            self.failed += 1
