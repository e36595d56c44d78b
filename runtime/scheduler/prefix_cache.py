"""Prompts that begin alike share the keys and values of their beginning.

A page's key is a hash over the adapter's content and every token up to the page's end, chained page by page; a page is
therefore never shared between adapters, between two contents of one adapter's name, or between prompts that differ
anywhere before its end. Keys are cryptographic: nobody can craft a prompt that reads another's page.
"""

from array import array
from collections.abc import Mapping
from hashlib import blake2b

from ...ops.core.kv_layout import PAGE_SIZE
from .kv_pages import PageAllocator
from .sequence import Sequence

KEY_BYTES = 32


def root_key(content: str) -> bytes:
    """What the chain of an adapter starts from; `content` names what it computes ('' = the base model)."""
    return blake2b(content.encode(), digest_size=KEY_BYTES, person=b"prefix root").digest()


def next_key(key: bytes, tokens: list[int]) -> bytes:
    """The key of the page that holds `tokens` after the page (or root) with `key`."""
    return blake2b(key + array("i", tokens).tobytes(), digest_size=KEY_BYTES).digest()


class PrefixCache:
    """Finds and publishes the pages of sequences.

    Pages are published as soon as a plan that fills them is made: plans run in order, and within a step every layer
    stores the new keys and values of all sequences before any is read, so even a later sequence of the same plan may
    use them.

    `hashes`: adapter number -> content hash; an adapter without one shares with nobody but itself. `queries` and `hits`
    count prompt tokens at first admission.
    """

    def __init__(self, pages: PageAllocator, hashes: Mapping[int, str], enabled: bool = True) -> None:
        self.pages = pages
        self.enabled = enabled
        self.queries = 0
        self.hits = 0
        self._hashes = hashes

    def match(self, sequence: Sequence) -> list[int]:
        """Pages that hold the sequence's beginning already. At least one token is always left to compute."""
        if not self.enabled or not sequence.reads_cache:
            return []
        count = (len(sequence.tokens) - 1) // PAGE_SIZE
        self._extend_keys(sequence, count)
        return self.pages.find(sequence.page_keys[:count])

    def started(self, sequence: Sequence) -> None:
        """A sequence was admitted with its matched pages: counts the hit."""
        if not sequence.preemptions:
            self.queries += sequence.prompt_length
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_length)
            self.hits += sequence.cached_tokens

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Make the pages findable that are full of known tokens once `computed` tokens are stored."""
        count = min(computed, len(sequence.tokens)) // PAGE_SIZE
        if self.enabled and count > sequence.published:
            self._extend_keys(sequence, count)
            for index in range(sequence.published, count):
                self.pages.publish(sequence.pages[index], sequence.page_keys[index])
        if count > sequence.published:
            sequence.published, sequence.publish_at = count, (count + 1) * PAGE_SIZE

    def reset(self) -> bool:
        """Forget every page; False, and nothing is forgotten, while somebody refers to a page."""
        if self.pages.num_used:
            return False
        self.pages.forget_idle()
        return True

    def content_of(self, number: int) -> str:
        """What names an adapter's content ('': the base model); requests share by it, here and in rings of answers."""
        if number < 0:
            return ""
        known = self._hashes.get(number)
        return f"number {number}" if known is None else f"content {known}"

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        keys = sequence.page_keys
        if len(keys) >= count:
            return
        key = keys[-1] if keys else root_key(self.content_of(sequence.number))
        for index in range(len(keys), count):
            key = next_key(key, sequence.tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            keys.append(key)
