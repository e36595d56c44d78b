"""Allocation of KV pages, and the prefix cache: prompts with a common prefix share its pages.

A page holds the keys and values of `PAGE_SIZE` tokens in every layer. A full page's key is a hash over the adapter's
content and all tokens up to the page's end, chained page by page. So pages are shared only for equal tokens under equal
adapter content. Before the activation of an aLoRA adapter the content is the base model's. The hash is cryptographic:
no prompt can be crafted to read another one's pages.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from secrets import token_hex

from ...ops.core.kv_layout import PAGE_SIZE
from .sequence import Sequence

KEY_BYTES = 32


class PageAllocator:
    """Allocates pages 0..num_pages-1 and counts their references.

    A full page may be published under its key; `find` then returns it, and `share` adds references. A published page
    without references is idle. Idle pages are evicted when memory is needed, in the order in which they were freed. The
    last page of a prefix is evicted first, because a page is useless without those before it. Other free pages are
    reused last in, first out, so that an engine with little load uses few pages.

    before_eviction  called with an idle page and its key before the page is reused
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1")
        self.num_pages = num_pages
        self.evictions = 0
        self.before_eviction: Callable[[int, bytes], None] | None = None
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._key: list[bytes | None] = [None] * num_pages
        self._page: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order of eviction

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return: empty and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Idle pages."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages with references."""
        return self.num_pages - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with one reference each; None if fewer are free."""
        if count > self.num_free:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of these published pages."""
        for page in pages:
            if self._key[page] is None:
                raise ValueError(f"page {page} is shared but was never published")
            self._references[page] += 1
            self._idle.pop(page, None)

    def free(self, pages: list[int]) -> None:
        """Remove a reference from each page; `pages`: in the order of their tokens.

        Raises ValueError for an unallocated page: two sequences would share it.
        """
        for page in reversed(pages):
            if not 0 <= page < self.num_pages or self._references[page] < 1:
                raise ValueError(f"page {page} is freed but was not allocated")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._key[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def publish(self, page: int, key: bytes) -> None:
        """Let `find` return a full page. If another page has the key, that one is kept."""
        if self._references[page] < 1 or self._key[page] is not None:
            problem = "not allocated" if self._references[page] < 1 else "already has a key"
            raise ValueError(f"page {page} cannot be published: {problem}")
        if key not in self._page:
            self._page[key] = page
            self._key[page] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest published prefix of these keys."""
        pages = []
        for key in keys:
            page = self._page.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def count_idle(self, pages: Iterable[int]) -> int:
        """Return how many of these pages have no references; `num_free` counts them."""
        return sum(not self._references[page] for page in pages)

    def unpublish(self, pages: Iterable[int]) -> None:
        """Remove the keys of pages with wrong content."""
        for page in pages:
            key, self._key[page] = self._key[page], None
            if key is not None:
                del self._page[key]
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def next_evicted(self, count: int) -> Iterator[tuple[int, bytes]]:
        """Yield the idle pages that the next `count` allocated pages evict, with their keys, in order."""
        for page in islice(self._idle, max(0, count - len(self._free))):
            key = self._key[page]
            if key is not None:
                yield page, key

    def forget_idle(self) -> None:
        """Remove the keys of all idle pages."""
        self.unpublish(list(self._idle))

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        key, self._key[page] = self._key[page], None
        if key is not None:
            del self._page[key]
            if self.before_eviction is not None:
                self.before_eviction(page, key)
        self.evictions += 1
        return page


def root_key(content: str) -> bytes:
    """Return the first key of an adapter's chain; `content`: name of its content, '' = the base model."""
    return blake2b(content.encode(), digest_size=KEY_BYTES, person=b"prefix root").digest()


def activation_tag(content: str, offset: int) -> bytes:
    """Return what the key before a page is extended by if an aLoRA adapter is active from `offset` in the page on."""
    return blake2b(f"alora {content} {offset}".encode(), digest_size=KEY_BYTES).digest()


def next_key(key: bytes, tokens: list[int]) -> bytes:
    """Return the key of the page of `tokens` after the page (or root) with `key`."""
    return blake2b(key + array("i", tokens).tobytes(), digest_size=KEY_BYTES).digest()


class PrefixCache:
    """Finds and publishes the pages of sequences.

    hashes         adapter number -> content hash; an adapter without one shares with itself only
    queries, hits  prompt tokens at first admission, and those found; `host_hits`: those of them from host memory

    A page is published when a plan that fills it is made: plans run in order, and each layer stores all new keys and
    values of a step before it reads any, so that a later sequence of the same plan may use the page.
    """

    def __init__(self, pages: PageAllocator, hashes: Mapping[int, str], enabled: bool = True) -> None:
        self.pages = pages
        self.enabled = enabled
        self.queries = 0
        self.hits = 0
        self.host_hits = 0
        self._hashes = hashes
        self._own = token_hex(16)  # pages on disk outlive the numbers

    def match(self, sequence: Sequence) -> list[int]:
        """Return the cached pages of the sequence's prefix, leaving at least one token to compute."""
        return self.pages.find(self.keys(sequence))

    def keys(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the pages of the sequence's prefix that it may read."""
        count = sequence.cacheable // PAGE_SIZE
        if not self.enabled or not count:
            return []
        self._extend_keys(sequence, count)
        return sequence.page_keys[:count]

    def count_hits(self, sequence: Sequence) -> None:
        """Count the cached tokens of a sequence that was just admitted."""
        if not sequence.preemptions:
            self.queries += sequence.prompt_length
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_length)
            loaded = min(sequence.pages_loaded * PAGE_SIZE, sequence.cached_tokens)
            self.hits += sequence.cached_tokens
            self.host_hits += loaded
            if sequence.prefill_cached is not None:  # another engine has computed the rest for this request
                least = min(sequence.cached_tokens, sequence.prefill_cached)
                sequence.cached_tokens = max(sequence.cached_tokens - loaded, least)

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Publish the sequence's pages that are full of known tokens once `computed` tokens are stored.

        In an exact engine pages with or after sampled tokens are not published: prompts are computed in other steps.
        """
        known = sequence.sampled[0][0] if sequence.sampled else len(sequence.tokens)
        count = min(computed, known) // PAGE_SIZE
        if count <= sequence.published:
            return
        if self.enabled and not sequence.versions:
            self._extend_keys(sequence, count)
            for index in range(sequence.published, count):
                self.pages.publish(sequence.pages[index], sequence.page_keys[index])
        sequence.published, sequence.publish_at = count, (count + 1) * PAGE_SIZE

    def reset(self) -> bool:
        """Forget every page; return False, without effect, while pages are in use."""
        if self.pages.num_used:
            return False
        self.pages.forget_idle()
        return True

    def content_of(self, number: int) -> str:
        """Return the name of an adapter's content, '' = the base model. Requests share pages and answers by it."""
        if number < 0:
            return ""
        known = self._hashes.get(number)
        return f"number {number} of {self._own}" if known is None else f"content {known}"

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        keys = sequence.page_keys
        if len(keys) >= count:
            return
        content, active_from = self.content_of(sequence.number), sequence.active_from
        key = keys[-1] if keys else root_key("" if active_from > 0 else content)
        for index in range(len(keys), count):
            if active_from > 0 and index == active_from // PAGE_SIZE:
                key += activation_tag(content, active_from % PAGE_SIZE)
            key = next_key(key, sequence.tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            keys.append(key)
