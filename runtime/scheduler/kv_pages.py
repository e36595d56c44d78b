"""Which KV pages are free, who refers to the others, and which hold a known prefix.

A page holds `PAGE_SIZE` tokens (`ops/core/kv_layout.py`), in every layer at once.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out page numbers 0..num_pages-1 and counts their references.

    A full page may be published under a key that names its content (all tokens up to its end, and the adapter): others
    can then `find` and `share` it. When nobody refers to a published page it stays findable until its memory is needed;
    the one that was given back first goes first, and of pages given back together the last ones, because a prefix is
    worth nothing without its beginning.

    Other pages are handed out last-in-first-out, which keeps a lightly loaded engine within few pages.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1")
        self.num_pages = num_pages
        self.evictions = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._key: list[bytes | None] = [None] * num_pages
        self._page: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published and unreferenced, first to go first

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out: empty ones and published ones that nobody refers to."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Pages that nobody refers to and that can still be found."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that somebody refers to."""
        return self.num_pages - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing is taken) if fewer are free."""
        if count > self.num_free:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each of these published pages."""
        for page in pages:
            if self._key[page] is None:
                raise ValueError(f"page {page} is shared but was never published")
            self._references[page] += 1
            self._idle.pop(page, None)

    def free(self, pages: Sequence[int]) -> None:
        """Give references back, a prefix's pages in order.

        Raises ValueError for a page that is not taken: two sequences would come to share it.
        """
        for page in reversed(pages):
            if not 0 <= page < self.num_pages or self._references[page] < 1:
                raise ValueError(f"page {page} is given back but was not taken")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._key[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def publish(self, page: int, key: bytes) -> None:
        """Make a full page findable. A key that another page has already stays with that one."""
        if self._references[page] < 1 or self._key[page] is not None:
            raise ValueError(
                f"page {page} is published but {'not taken' if self._references[page] < 1 else 'has a key already'}"
            )
        if key not in self._page:
            self._page[key] = page
            self._key[page] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest known beginning of a prefix, whose pages have these keys."""
        found = []
        for key in keys:
            page = self._page.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def count_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody refers to: `num_free` counts them."""
        return sum(not self._references[page] for page in pages)

    def unpublish(self, pages: Iterable[int]) -> None:
        """These pages do not hold what their keys say: nobody finds them any more."""
        for page in pages:
            key, self._key[page] = self._key[page], None
            if key is not None:
                del self._page[key]
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def forget_idle(self) -> None:
        """Nobody finds the published pages any more that nobody refers to."""
        self.unpublish(list(self._idle))

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        key = self._key[page]
        if key is not None:
            del self._page[key]
        self._key[page] = None
        self.evictions += 1
        return page
