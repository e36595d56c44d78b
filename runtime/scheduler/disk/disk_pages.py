"""KV pages in host memory and in files, the second and third tier of the prefix cache.

A page is written to a file once its copy in host memory is complete and the steps that computed it have succeeded. So
it is found after its eviction from host memory, and by later engines. Pages of a waiting prompt that have only files
are read into host memory first. The sequence waits for that as for a load, is queued again, and then loads them.

Threads of the runner read and write (`worker.disk`). An order is one page, a `PageCopies` with a ticket. Its page of
host memory is pinned until the order has ended.
"""

import logging
import os
import re
from collections import OrderedDict, deque

from ..host_pages import MAX_LOADS, HostPages
from ..kv_cache import KEY_BYTES, PageAllocator
from ..sequence import Sequence
from ..step_plan import FileOrder, PageCopies

MAX_WRITES = 16
"""Writes in flight. Pages that leave host memory before they are written are dropped."""
PAGE_ABSENT = "the page has no file"
PAGE_DAMAGED = "the page's file was damaged and has been deleted"
SUFFIX = ".page"
_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}{re.escape(SUFFIX)}")
_Saved = tuple[bytes, tuple[int, int]]  # a key, and its entry in the directory of host memory
_log = logging.getLogger(__name__)


class DiskBackedPages(HostPages):
    """`HostPages` with files below.

    prefix                       path of the files up to their keys; those of earlier and other engines are found
    max_files                    number of files that are remembered; the runner deletes the least recently used ones
    written, read                numbers of pages
    dropped, damaged, failures   pages evicted from host memory without a file; damaged files; other failed orders
    """

    def __init__(self, num_pages: int, device: PageAllocator, window: int, prefix: str, max_files: int) -> None:
        super().__init__(num_pages, device, window)
        self.max_files = max_files
        self.written = self.read = self.dropped = self.damaged = self.failures = 0
        self._known = _pages_with(prefix, max_files)
        self._new: list[_Saved] = []
        self._saving: dict[int, list[_Saved]] = {}  # by the ticket of their copies
        self._unwritten: deque[_Saved] = deque(maxlen=num_pages)
        self._orders: dict[int, FileOrder] = {}
        self._pinned: set[int] = set()
        self._reading: dict[bytes, int] = {}  # key -> ticket
        self._num_writes = 0
        self._cleared = 0  # pages of orders up to this ticket are not used
        self._closed = False

    def stats(self) -> dict[str, int]:
        """Return fields of SchedulerStats."""
        return super().stats() | {
            "disk_pages": self.max_files,
            "disk_pages_used": len(self._known),
            "disk_pages_written": self.written,
            "disk_pages_read": self.read,
            "disk_pages_dropped": self.dropped,
            "disk_pages_damaged": self.damaged,
            "disk_failures": self.failures,
        }

    def start_load(self, sequence: Sequence, cached: list[int], keys: list[bytes]) -> bool:
        """See `HostPages.start_load`. Pages of the prefix that have only files are read first."""
        if sequence.loads < MAX_LOADS and (tickets := self._start_reads(keys[len(cached) :])):
            sequence.loads += 1
            self._waiting[sequence] = tickets, 0
            return True
        return super().start_load(sequence, cached, keys)

    def _start_reads(self, keys: list[bytes]) -> set[int]:
        """Start to read pages of a prefix into host memory; return the tickets of all reads of its pages."""
        wanted, tickets, resident = [], set(), []
        for key in keys:
            if key in self._reading:
                tickets.add(self._reading[key])
            elif key in self._pages:
                resident.append(key)
            elif key in self._known and not self._device.find((key,)):
                wanted.append(key)
            elif key not in self._loading and not self._device.find((key,)):
                break
        # at most half of host memory: reads should not evict the pages of one another
        del wanted[max(0, max(1, self.num_pages // 2) - len(self._reading)) :]
        if wanted:
            for key in reversed(resident):
                self._pages.move_to_end(key)
            if self._saves:
                self._add_copies([])  # a place may be that of a page just saved
        for key in wanted:
            place = self._take_place()
            if place is None:
                break
            self._reading[key] = self._order(FileOrder("read", key, place))
            tickets.add(self._reading[key])
        return tickets

    def take_copies(self) -> list[PageCopies]:
        """See `HostPages.take_copies`. Adds the next writes."""
        copies = super().take_copies()
        while self._unwritten and self._num_writes < min(MAX_WRITES, max(1, self.num_pages // 4)):
            key, (place, saved_before) = self._unwritten[0]
            if saved_before > self.oldest_step:
                break  # a step that it depends on may still fail
            self._unwritten.popleft()
            if self._pages.get(key) == (place, saved_before) and key not in self._known and place not in self._pinned:
                self._order(FileOrder("write", key, place))
                self._num_writes += 1
        orders, self._copies = self._copies, []
        return copies + orders

    def _order(self, order: FileOrder) -> int:
        self._ticket += 1
        self._orders[self._ticket] = order
        self._pinned.add(order.place)
        self._copies.append(PageCopies(self._ticket, [], [], file=order))
        return self._ticket

    def _add_copies(self, loads: list[tuple[int, int]]) -> int:
        ticket = super()._add_copies(loads)
        if self._new:
            self._saving[ticket], self._new = self._new, []
        return ticket

    def _save(self, page: int, key: bytes) -> None:
        before = self.saved
        super()._save(page, key)
        if self.saved > before and not self._closed:
            self._new.append((key, self._pages[key]))

    def _take_place(self) -> int | None:
        if self._free:
            return self._free.pop()
        for key, (place, _) in self._pages.items():
            if place not in self._pinned:
                del self._pages[key]
                self.evicted += 1
                self.dropped += not self._closed and key not in self._known
                return place
        return None

    def finish(self, ticket: int, problem: str | None) -> list[Sequence]:
        """See `HostPages.finish`. A failed order concerns only its page."""
        order = self._orders.pop(ticket, None)
        if order is None:
            saved = self._saving.pop(ticket, [])
            if problem is None:
                self._unwritten.extend(saved)
            return super().finish(ticket, problem)
        self._pinned.discard(order.place)
        self.damaged += problem == PAGE_DAMAGED
        self.failures += problem not in (None, PAGE_DAMAGED, PAGE_ABSENT)
        succeeded = problem is None and ticket > self._cleared
        if order.action == "delete_all":
            return []
        self._known.pop(order.key, None)
        if succeeded:
            self._known[order.key] = None
            if len(self._known) > self.max_files:
                self._known.popitem(last=False)
        if order.action == "write":
            self._num_writes -= 1
            self.written += succeeded
        else:
            del self._reading[order.key]
            self.read += succeeded
            if succeeded:
                self._pages.setdefault(order.key, (order.place, 0))
        if self._pages.get(order.key, (-1, 0))[0] != order.place:  # forgotten, or saved meanwhile
            self._free.append(order.place)
        return self._end_waits(ticket)

    def _forget_pages(self) -> None:
        super()._forget_pages()
        self._free = [place for place in self._free if place not in self._pinned]
        self._new = []
        self._saving.clear()
        self._unwritten.clear()
        self._cleared = self._ticket

    def clear(self) -> None:
        """Forget all pages, and delete their files."""
        super().clear()
        self._known.clear()
        if not self._closed:
            self._order(FileOrder("delete_all"))

    def close_files(self) -> None:
        """Neither read nor write files any more, because the weights may change. The files are kept."""
        if not self._closed:
            _log.warning("KV pages on disk are not used any more, since the weights may change; start the engine again")
        self._closed = True
        self._known.clear()
        self._forget_pages()


def _pages_with(prefix: str, limit: int) -> "OrderedDict[bytes, None]":
    """Return the keys of at most `limit` pages with files. Their content is checked when they are read."""
    folder, start = os.path.split(prefix)
    try:
        names = [name.removeprefix(start) for name in os.listdir(folder) if name.startswith(start)]
    except OSError:  # the disk fails
        names = []
    keys = [bytes.fromhex(name.removesuffix(SUFFIX)) for name in names if _NAME.fullmatch(name)]
    return OrderedDict.fromkeys(keys[:limit])
