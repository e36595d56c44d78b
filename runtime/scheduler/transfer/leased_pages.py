"""Host pages of a prefill engine: it holds the pages of each prompt under a lease until a decode engine has read them.

A lease is an optimization. A decode engine compares the key of a page before and after it reads the page, so that it
notices a page that was evicted nevertheless.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..host_pages import HostPages
from ..kv_cache import PageAllocator
from ..sequence import Sequence

LEASE_SECONDS = 30.0
HELD_SHARE = 0.75
"""Largest part of the host pages that leases hold. A lease beyond it has fewer pages, and the decode engine computes
the rest.
"""


@dataclass
class _Lease:
    """The held pages of a prompt by key; `tickets`: copies that save some of them."""

    deadline: float
    keys: list[bytes] = field(default_factory=list)
    tickets: set[int] = field(default_factory=set)


@dataclass
class _HeldPage:
    """Entry of a page that leases hold, to return to the directory, and the number of leases."""

    entry: tuple[int, int]
    leases: int = 0


class LeasedPages(HostPages):
    """`HostPages` in memory that decode engines read, and leases by name.

    clock   monotonic seconds
    """

    def __init__(
        self, num_pages: int, device: PageAllocator, window: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(num_pages, device, window)
        self.expired = 0
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._held: dict[bytes, _HeldPage] = {}
        self._keys: list[bytes] = []  # of `_saves`
        self._saving: set[int] = set()  # tickets of saves in flight
        self._ended: list[str] = []

    def stats(self) -> dict[str, int]:
        return super().stats() | {
            "host_pages_used": len(self._pages) + len(self._held),
            "page_leases": len(self._leases),
            "pages_leased": len(self._held),
            "page_leases_expired": self.expired,
        }

    def hold(self, name: str, keys: list[bytes], pages: list[int]) -> None:
        """Save the first pages of a prompt, and hold them under a lease. `pages`: of the device, with these keys."""
        lease = self._leases[name] = _Lease(self._clock() + LEASE_SECONDS)
        limit = max(1, int(HELD_SHARE * self.num_pages))
        for key, page in zip(keys, pages, strict=False):
            held = self._held.get(key)
            if held is None:
                if len(self._held) >= limit:
                    break
                self._save(page, key)
                entry = self._pages.pop(key, None)
                if entry is None:  # all other pages are being loaded
                    break
                held = self._held[key] = _HeldPage(entry)
            held.leases += 1
            lease.keys.append(key)
        if self._saves:
            self._add_copies([])
        lease.tickets = set(self._saving)

    def places(self, name: str) -> list[int] | None:
        """Return the places of a lease's pages when all are saved; None until then. [] without such a lease."""
        lease = self._leases.get(name)
        if lease is None:
            return []
        return None if lease.tickets else [self._held[key].entry[0] for key in lease.keys]

    def release(self, name: str) -> None:
        """End a lease; unknown names are ignored."""
        lease = self._leases.pop(name, None)
        for key in reversed(lease.keys) if lease is not None else ():  # the first page is evicted last
            held = self._held[key]
            held.leases -= 1
            if not held.leases:
                self._pages[key] = self._held.pop(key).entry

    def take_expired(self) -> list[str]:
        """Return the leases that have expired since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def save_ahead(self) -> None:
        now = self._clock()
        while self._leases:
            name, lease = next(iter(self._leases.items()))
            if lease.deadline > now:
                break
            self.release(name)
            self.expired += 1
            self._ended.append(name)
        super().save_ahead()

    def _save(self, page: int, key: bytes) -> None:
        if key in self._held:
            return
        count = len(self._saves)
        super()._save(page, key)
        if len(self._saves) > count:
            self._keys.append(key)

    def _add_copies(self, loads: list[tuple[int, int]]) -> int:
        ticket = super()._add_copies(loads)
        if self._keys:
            self._copies[-1] = self._copies[-1]._replace(keys=tuple(self._keys))
            self._keys = []
            self._saving.add(ticket)
        return ticket

    def finish(self, ticket: int, problem: str | None) -> list[Sequence]:
        self._saving.discard(ticket)
        for lease in self._leases.values():
            lease.tickets.discard(ticket)
        return super().finish(ticket, problem)

    def _discard(self, problem: str) -> None:
        super()._discard(problem)
        self.clear()

    def clear(self) -> None:
        """Forget all pages, and let no decode engine read them. Leases are empty then."""
        if self._saves:
            self._add_copies([])
        super().clear()
        self._held.clear()
        for lease in self._leases.values():
            lease.keys.clear()
        self._add_copies([])
        self._copies[-1] = self._copies[-1]._replace(erase=True)

    def forget_since(self, step: int) -> None:
        """Forget all pages: a decode engine may have the place of one that the failed step has written."""
        self.clear()
