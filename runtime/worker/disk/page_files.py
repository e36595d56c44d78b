"""Threads that write KV pages of host memory to files and read them back. `scheduler.disk` decides which."""

import hashlib
import json
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ....compiler.options import CompileOptions, OptionError
from ....ops.core.kv_layout import PAGE_SIZE
from ...adapters.background_jobs import END_SECONDS, stop_threads
from ...engine.options import DEFAULT_DISK_GB, EngineOptions
from ...processes.threads import start_thread
from ...scheduler.disk.disk_pages import file_name
from ...scheduler.step_plan import FileOrder, PageCopies
from ..memory_budget import GIB
from .page_folder import HEADER_BYTES, MAGIC, MAX_FILES, PageFolder

NUM_READERS, NUM_WRITERS = 4, 2
_log = logging.getLogger(__name__)


class PageFiles:
    """Executes orders for files on its threads, which end with it.

    pages        host memory, uint8 [num_pages, bytes]
    root, limit  directory of the files of all engines, and their most bytes
    tp_size      engines' ranks share the limit

    Raises OptionError for an unusable directory, or a limit below one page.
    """

    def __init__(self, pages: torch.Tensor, root: Path, fingerprint: str, limit: int, tp_size: int = 1) -> None:
        size = tp_size * (HEADER_BYTES + pages.shape[1])
        if limit < size:
            raise OptionError(f"kv_disk_gb={limit / GIB:.4g} does not hold one KV page of {size} bytes; raise it")
        self.folder = PageFolder(root, fingerprint, limit)
        self.max_files = min(MAX_FILES // tp_size, limit // size)
        self._reads: queue.SimpleQueue[PageCopies | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[PageCopies | None] = queue.SimpleQueue()
        self._executor = _Executor(self.folder, pages.numpy())
        stop = partial(_stop, self._executor.stopped, self._reads, self._writes)
        jobs = [("kv-read", self._reads)] * NUM_READERS + [("kv-write", self._writes)] * NUM_WRITERS
        threads = [start_thread(self._executor.run, orders, name=name, stop=stop) for name, orders in jobs]
        weakref.finalize(self, stop_threads, stop, threads, END_SECONDS).atexit = False

    def start(self, copies: PageCopies) -> None:
        """Enqueue an order; return at once."""
        is_read = copies.file is not None and copies.file.action == "read"
        if copies.file is not None and copies.file.action == "delete_all":
            self._executor.deleted_through = copies.ticket
        (self._reads if is_read else self._writes).put(copies)

    def finished(self) -> list[tuple[int, str | None]]:
        """Return (ticket, error or None) of orders that ended since the last call."""
        found, ended = [], self._executor.ended
        while ended:
            found.append(ended.popleft())
        return found


def open_page_files(
    pages: torch.Tensor, engine: EngineOptions, compiler: CompileOptions, parts: Sequence[object]
) -> PageFiles:
    """Return the files of `kv_disk` for this rank's host memory. `parts`: all that a page's bytes depend on, besides
    its key.

    Raises OptionError as `PageFiles` does.
    """
    tp_size, root = compiler.tensor_parallel, Path(engine.kv_disk).resolve()
    content = [MAGIC.decode(), PAGE_SIZE, tp_size, compiler.tensor_parallel_rank, *parts]
    fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    gigabytes = DEFAULT_DISK_GB if engine.kv_disk_gb is None else engine.kv_disk_gb
    return PageFiles(pages, root, fingerprint, round(gigabytes * GIB), tp_size)


class _Executor:
    """State of the threads, without a reference to their owner.

    deleted_through  writes up to this ticket must leave no file
    """

    def __init__(self, folder: PageFolder, pages: NDArray[np.uint8]) -> None:
        self.ended: deque[tuple[int, str | None]] = deque()
        self.stopped = threading.Event()
        self.deleted_through = 0
        self._folder, self._pages = folder, pages
        self._reported: set[str] = set()

    def run(self, orders: "queue.SimpleQueue[PageCopies | None]") -> None:
        """Execute orders until None, or until `stopped` is set."""
        while (copies := orders.get()) is not None and copies.file is not None and not self.stopped.is_set():
            try:
                problem = self._execute(copies.ticket, copies.file)
            except Exception as error:
                problem = str(error) or type(error).__name__
                self._report(error, problem)
            self.ended.append((copies.ticket, problem))

    def _execute(self, ticket: int, order: FileOrder) -> str | None:
        if order.action == "read":
            return self._folder.load(order.key, self._pages[order.place])
        if order.action == "delete_all":
            self._folder.delete_all()
        else:
            self._folder.save(order.key, self._pages[order.place])
            if ticket <= self.deleted_through:
                self._folder.remove(file_name(order.key))
        return None

    def _report(self, error: Exception, problem: str) -> None:
        """Log each kind of failure once: a full disk fails at every page."""
        kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if kind not in self._reported:
            self._reported.add(kind)
            _log.warning(
                "KV pages are not kept on disk, or not found there: %s; the engine goes on without them, and this is "
                "logged once",
                problem,
                exc_info=None if isinstance(error, OSError) else error,
            )


def _stop(stopped: threading.Event, *orders: "queue.SimpleQueue[PageCopies | None]") -> None:
    stopped.set()
    for each in orders:
        for _ in range(max(NUM_READERS, NUM_WRITERS)):
            each.put(None)
