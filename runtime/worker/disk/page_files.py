"""Threads that write KV pages of host memory to files and read them back. `scheduler.disk` decides which."""

import hashlib
import json
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ....compiler.options import CompileOptions, OptionError
from ....ops.core.kv_layout import PAGE_SIZE
from ...engine.options import DEFAULT_DISK_GB, EngineOptions
from ...scheduler.step_plan import FileOrder, PageCopies
from ..memory_budget import GIB
from .page_folder import HEADER_BYTES, MAGIC, PageFolder

NUM_READERS, NUM_WRITERS = 4, 2
MAX_FILES = 1 << 18
"""With small pages they end before the bytes do."""
_log = logging.getLogger(__name__)


class PageFiles:
    """Executes orders for files of `pages`, host memory uint8 [num_pages, bytes], on threads.

    folder     the files, of at most `limit` bytes; those of the parts of a page on `tp_size` ranks share them
    max_files  most files of this rank

    Raises OptionError for an unusable directory, or a limit below two pages.
    """

    def __init__(self, pages: torch.Tensor, root: Path, fingerprint: str, limit: int, tp_size: int = 1) -> None:
        size = tp_size * (HEADER_BYTES + pages.shape[1])
        if limit < 2 * size:
            raise OptionError(f"kv_disk_gb={limit / GIB:.4g} does not hold two KV pages of {size} bytes; raise it")
        self.max_files = min(MAX_FILES, limit // size)
        self.folder = PageFolder(root, fingerprint, self.max_files * size)
        self._pages = pages.numpy()
        # their threads end with them
        self._readers, self._writers = ThreadPoolExecutor(NUM_READERS), ThreadPoolExecutor(NUM_WRITERS)
        self._ended: deque[tuple[int, str | None]] = deque()
        self._deleted_through = 0  # writes up to this ticket must leave no file
        self._logged: set[str] = set()

    def start(self, copies: PageCopies) -> None:
        """Enqueue an order; return at once."""
        if copies.file is None:
            raise ValueError("the copies have no order for a file")
        if copies.file.action == "delete_all":
            self._deleted_through = copies.ticket
        threads = self._readers if copies.file.action == "read" else self._writers
        threads.submit(self._execute, copies.ticket, copies.file)

    def finished(self) -> list[tuple[int, str | None]]:
        """Return (ticket, error or None) of orders that ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def _execute(self, ticket: int, order: FileOrder) -> None:
        """Execute an order. Each kind of failure is logged once: a full disk fails at every page."""
        problem = None
        try:
            if order.action == "read":
                problem = self.folder.load(order.key, self._pages[order.place])
            elif order.action == "delete_all":
                self.folder.delete_all()
            else:
                self.folder.save(order.key, self._pages[order.place])
                if ticket <= self._deleted_through:
                    self.folder.remove(self.folder.name(order.key))
        except Exception as error:
            problem, kind = str(error) or type(error).__name__, f"{type(error)} {getattr(error, 'errno', '')}"
            if kind not in self._logged:
                self._logged.add(kind)
                trace = None if isinstance(error, OSError) else error
                _log.warning("KV pages are not kept on disk, or not read (logged once): %s", problem, exc_info=trace)
        self._ended.append((ticket, problem))


def open_page_files(
    pages: torch.Tensor, engine: EngineOptions, compiler: CompileOptions, parts: Sequence[object]
) -> PageFiles:
    """Return the files of `kv_disk` for this rank's host memory. `parts`: all that a page's bytes depend on, besides
    its key.

    Raises OptionError as `PageFiles` does.
    """
    tp_size = compiler.tensor_parallel
    content = [MAGIC.decode(), PAGE_SIZE, tp_size, compiler.tensor_parallel_rank, *parts]
    fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    gigabytes = DEFAULT_DISK_GB if engine.kv_disk_gb is None else engine.kv_disk_gb
    return PageFiles(pages, Path(engine.kv_disk).resolve(), fingerprint, round(gigabytes * GIB), tp_size)
