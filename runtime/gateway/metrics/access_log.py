"""A JSON line for each HTTP request, written by a separate thread, so that a slow disk or pipe delays no request."""

import os
import queue
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ..interfaces import AdmittedRequest, HttpExchange, UsageRecord
from .observers import BaseObserver

MAX_QUEUED = 16384
MAX_PATH = 512
CLOSING_SECONDS = 5.0
"""Time limit to write queued lines at shutdown: writing to a pipe that is not read would block forever."""
_encode = msgspec.json.Encoder().encode


class AccessLog(BaseObserver):
    """Writes to a file, or to stdout for None.

    A file that was moved (by logrotate) is created again. Lines that do not fit into the queue, or that cannot be
    written, are dropped and counted. Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path | None, max_queued: int = MAX_QUEUED) -> None:
        self._path = path
        self._file = sys.stdout if path is None else path.open("a", encoding="utf-8")
        self._not_queued = self._not_written = 0
        self._queue: queue.Queue[str | None] = queue.Queue(max_queued)
        self._thread = threading.Thread(target=self._run, name="sidestream-access-log", daemon=True)
        self._thread.start()
        self._records: dict[str, list[UsageRecord]] = {}

    @property
    def dropped(self) -> int:
        """Number of dropped lines."""
        return self._not_queued + self._not_written

    def close(self) -> None:
        """Write queued lines and stop. Lines that are not written within CLOSING_SECONDS are dropped."""
        deadline = time.monotonic() + CLOSING_SECONDS
        try:
            self._queue.put(None, timeout=CLOSING_SECONDS)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._not_queued += self._queue.qsize()
        elif self._path is not None:
            self._file.close()

    def _run(self) -> None:
        for line in iter(self._queue.get, None):
            try:
                self._reopen_if_moved()
                self._file.write(f"{line}\n")
                self._file.flush()
            except (OSError, ValueError):  # ValueError: a closed file
                self._not_written += 1

    def _reopen_if_moved(self) -> None:
        if self._path is None:
            return
        if not self._file.closed:
            try:
                current = os.stat(self._path)
            except FileNotFoundError:
                current = None
            if current is not None and os.path.samestat(current, os.fstat(self._file.fileno())):
                return
            self._file.close()
        self._file = self._path.open("a", encoding="utf-8")

    def on_finished(self, request: AdmittedRequest, record: UsageRecord) -> None:
        """See `Observer`. Keeps the record for `on_http_exchange`."""
        self._records.setdefault(record.request_id, []).append(record)

    def on_http_exchange(self, exchange: HttpExchange) -> None:
        line = {
            "time": datetime.fromtimestamp(exchange.time, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "request_id": exchange.request_id,
            "client": exchange.client_host,
            "owner": exchange.owner,
            "method": exchange.method,
            "path": exchange.path[:MAX_PATH].encode("utf-8", "replace").decode(),
            "status": exchange.status,
            "seconds": round(exchange.seconds, 6),
            "bytes": exchange.body_bytes,
        }
        records = self._records.pop(exchange.request_id, None)
        if records:
            record = records.pop()
            if records:  # several open requests have the same id, chosen by their client
                self._records[exchange.request_id] = records
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
        try:
            self._queue.put_nowait(_encode(line).decode())
        except queue.Full:
            self._not_queued += 1
