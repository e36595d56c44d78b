"""KV pages of prefill engines that a decode engine loads, in place of host pages of its own."""

from collections import OrderedDict

from ...api.request import PageOffer
from ..host_pages import HostPages
from ..kv_cache import PageAllocator
from ..sequence import Sequence
from ..step_plan import PageCopies


class OfferedPages(HostPages):
    """Loads the pages that requests bring with them (`Sequence.offer`), each once.

    The runner compares the keys in the other engine's memory with those of this engine's prompt. If a page is not there
    any more, none of the load is used, and the sequence computes its prompt.

    refused   loads that were not used
    """

    def __init__(self, device: PageAllocator) -> None:
        super().__init__(0, device, 0)
        device.before_eviction = None
        self.refused = 0
        self._offer = PageOffer("", ())
        self._key_at: dict[int, bytes] = {}  # place in the offer -> key

    def stats(self) -> dict[str, int]:
        return super().stats() | {"page_loads_refused": self.refused}

    def save_ahead(self) -> None:
        """Save nothing: this engine has no host pages of its own."""

    def start_load(self, sequence: Sequence, cached: list[int], keys: list[bytes]) -> bool:
        offer, sequence.offer = sequence.offer, None
        if offer is not None:
            # a place that is named twice has one key only: the runner compares it
            self._offer, self._key_at = offer, dict(zip(offer.places, keys, strict=False))
            self._pages = OrderedDict((key, (place, 0)) for place, key in self._key_at.items())
        try:
            started = super().start_load(sequence, cached, keys)
        finally:
            self._pages.clear()
        if started and offer is not None:
            sequence.prefill_cached = offer.cached_tokens
        return started

    def _add_copies(self, loads: list[tuple[int, int]]) -> int:
        self._ticket += 1
        keys = tuple(self._key_at[place] for place, _ in loads)
        self._copies.append(PageCopies(self._ticket, [], loads, self._offer.source, keys))
        return self._ticket

    def _discard(self, problem: str) -> None:
        self.refused += 1
