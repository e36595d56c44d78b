"""Which KV pages are free. A page holds `PAGE_SIZE` tokens of one sequence, in every layer at once."""
from collections.abc import Iterable

from ..ops.kv_layout import PAGE_SIZE


def pages_for(tokens: int) -> int:
    """How many pages `tokens` tokens fill."""
    return -(-tokens // PAGE_SIZE)


class PageAllocator:
    """Hands out page numbers 0..num_pages-1; each belongs to one owner at a time.

    Pages are handed out last-in-first-out, which keeps a lightly loaded engine within few pages.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing is taken) if fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        pages.reverse()
        for page in pages:
            self._taken[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises ValueError for a page that is not taken: two sequences would come to share it."""
        for page in pages:
            if not 0 <= page < self.num_pages or not self._taken[page]:
                raise ValueError(f"page {page} is given back but was not taken")
            self._taken[page] = 0
            self._free.append(page)
