"""KV pages in host memory, the second tier of the prefix cache: the directory, and the copies to make.

A page that is to be evicted from the device is copied to host memory first (saved), and copied back (loaded) when the
prompt of a waiting sequence matches it. Pages have the same keys in both tiers. The runner has the memory, and makes
the copies in the order in which `take_copies` returns them: its saves, then its loads.

A sequence whose prefix is being loaded is `Status.LOADING`: it is not queued and holds neither a row nor a slot. When
the pages have arrived they are published on the device, and the sequence is queued again.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

from ...ops.core.kv_layout import pages_for
from .kv_cache import PageAllocator
from .sequence import Sequence
from .step_plan import PageCopies

MAX_LOADS = 2
"""Loads that a sequence waits for before it computes: its pages may be evicted again before it is admitted."""
SAVES_AHEAD = 16
"""Most idle pages that one step saves before they are evicted, besides as many as were evicted since the last step."""
_log = logging.getLogger(__name__)


@dataclass
class _Load:
    """A load in flight: the keys of its pages, the pages, and pages of the same prefix that must stay meanwhile."""

    keys: list[bytes]
    pages: list[int]
    held: list[int]


class HostPages:
    """Directory of `num_pages` pages of host memory: key -> page, least recently used first.

    device                   the pages on the device
    window                   number of pages for which the idle pages to evict are saved ahead
    step, oldest_step        number of the next plan, and of the oldest one that has not ended
    saved, loaded, evicted   numbers of pages
    """

    def __init__(self, num_pages: int, device: PageAllocator, window: int) -> None:
        self.num_pages = num_pages
        self.step = self.oldest_step = 0
        self.saved = self.loaded = self.evicted = 0
        self._device = device
        self._window = window
        self._pages: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # page, and the plan made after its save
        self._free = list(range(num_pages - 1, -1, -1))
        self._offered: dict[int, bytes] = {}  # device page -> key under which it was saved ahead
        self._evictions = 0  # of the device, at the last `save_ahead`
        self._saves: list[tuple[int, int]] = []
        self._copies: list[PageCopies] = []
        self._ticket = 0
        self._void = 0  # loads up to this ticket read invalid pages
        self._loads: dict[int, _Load] = {}
        self._loading: dict[bytes, int] = {}  # key -> ticket of its load
        # the tickets of a sequence's loads, and pages of the device that it needs besides those of its prefix
        self._waiting: dict[Sequence, tuple[set[int], int]] = {}
        device.before_eviction = self._save

    def stats(self) -> dict[str, int]:
        """Return fields of SchedulerStats."""
        return {
            "host_pages": self.num_pages,
            "host_pages_used": len(self._pages),
            "host_pages_saved": self.saved,
            "host_pages_loaded": self.loaded,
            "host_page_evictions": self.evicted,
        }

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for loads."""
        return len(self._waiting)

    @property
    def reserved(self) -> int:
        """Pages of the device that waiting sequences need besides those of their prefixes."""
        return sum(pages for _, pages in self._waiting.values())

    @property
    def is_loading(self) -> bool:
        """Whether a load is in flight."""
        return bool(self._loads)

    def save_ahead(self) -> None:
        """Save idle pages that are next to be evicted, so that a step need not wait until they are saved."""
        count = SAVES_AHEAD + self._device.evictions - self._evictions
        self._evictions = self._device.evictions
        for page, key in self._device.next_evicted(self._window):
            if self._offered.get(page) == key:
                continue
            self._offered[page] = key
            if key not in self._pages:
                self._save(page, key)
                count -= 1
                if not count:
                    return

    def _save(self, page: int, key: bytes) -> None:
        """Save a page of the device, or mark its copy as recently used."""
        if key in self._pages:
            self._pages.move_to_end(key)
            return
        place = self._take_place()
        if place is None:
            return  # all are being loaded
        self._pages[key] = place, self.step
        self._saves.append((page, place))
        self.saved += 1

    def _take_place(self) -> int | None:
        """Return a free page of host memory, if necessary the least recently used one; None if all are in use."""
        if not self._free:
            if not self._pages:
                return None
            _, (oldest, _) = self._pages.popitem(last=False)
            self._free.append(oldest)
            self.evicted += 1
        return self._free.pop()

    def start_load(self, sequence: Sequence, cached: list[int], keys: list[bytes]) -> bool:
        """Start to load pages of a sequence's prefix; return whether the sequence has to wait for loads.

        cached   pages of its prefix on the device
        keys     of all pages of its prefix
        """
        held, missing, tickets = list(cached), [], set()
        for key in keys[len(cached) :]:
            if page := self._device.find((key,)):
                held += page
            elif key in self._loading:
                tickets.add(self._loading[key])
            elif key in self._pages:
                missing.append(key)
            else:
                break
        if (not missing and not tickets) or sequence.loads == MAX_LOADS:
            return False
        if missing:
            self._device.share(held)
            # out of the directory, since saves of the pages that the load displaces may evict others
            sources = [self._pages.pop(key) for key in missing]
            pages = self._device.allocate(len(missing))
            for key, source in reversed(list(zip(missing, sources, strict=True))):
                self._pages[key] = source  # the first page last: later ones are useless without it
            if pages is None:
                self._device.free(held)
                return False
            ticket = self._add_copies([(place, page) for (place, _), page in zip(sources, pages, strict=True)])
            self._loads[ticket] = _Load(missing, pages, held)
            self._loading |= dict.fromkeys(missing, ticket)
            tickets.add(ticket)
            self.loaded += len(pages)
        sequence.loads += 1
        sequence.pages_loaded = sum(key in self._loading for key in keys)
        self._waiting[sequence] = tickets, pages_for(sequence.length) - len(held) - sequence.pages_loaded
        return True

    def _add_copies(self, loads: list[tuple[int, int]]) -> int:
        self._ticket += 1
        self._copies.append(PageCopies(self._ticket, self._saves, loads))
        self._saves = []
        return self._ticket

    def take_copies(self) -> list[PageCopies]:
        """Return the copies to start before the next plan."""
        if self._saves:
            self._add_copies([])
        copies, self._copies = self._copies, []
        return copies

    def finish(self, ticket: int, problem: str | None) -> list[Sequence]:
        """Report the end of copies from `take_copies`; return the sequences that need not wait any longer.

        `problem`: why they failed; then no page in host memory is used any more.
        """
        load = self._loads.pop(ticket, None)
        if problem is not None:
            self._discard(problem)
        if load is None:
            return []
        for key, page in zip(load.keys, load.pages, strict=True):
            del self._loading[key]
            if problem is None and ticket > self._void:
                self._device.publish(page, key)
        self._device.free(load.held + load.pages)
        return self._end_waits(ticket)

    def _end_waits(self, ticket: int) -> list[Sequence]:
        """Return the sequences that waited for this ticket last."""
        for tickets, _ in self._waiting.values():
            tickets.discard(ticket)
        ready = [sequence for sequence, (tickets, _) in self._waiting.items() if not tickets]
        for sequence in ready:
            del self._waiting[sequence]
        return ready

    def _discard(self, problem: str) -> None:
        """Discard what failed copies may have damaged."""
        _log.error("the copies of KV pages in host memory are discarded: %s", problem)
        self._forget_pages()

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence wait no longer. Its loads continue."""
        del self._waiting[sequence]

    def clear(self) -> None:
        """Forget all pages. Pages in flight are not used either."""
        self._forget_pages()

    def _forget_pages(self) -> None:
        self._pages.clear()
        self._offered.clear()
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._void = self._ticket

    def forget_since(self, step: int) -> None:
        """Forget pages that were saved after the plan of `step` was made: that step has failed."""
        for key, (page, saved_before) in list(self._pages.items()):
            if saved_before > step:
                del self._pages[key]
                self._free.append(page)
        self._offered.clear()
        self._void = self._ticket
