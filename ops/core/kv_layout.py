"""Layout of the paged KV cache, shared by every op that reads or writes it.

cache   [page][kv head][K | V][token][head_dim]  e4m3, int8 or the model's dtype; a page of one e4m3 head is 16 KB
scales  [page][kv head][K | V][token]            fp32, e4m3 and int8 caches only: value = stored * scale
A slot is `page * PAGE_SIZE + offset`; padding tokens have slot -1 and are not written.
"""

PAGE_SIZE = 64
KEY, VALUE = 0, 1
MIN_PREFIX_PAGES = 4  # of a prefix that decode attention reads once: with fewer, merging takes longer
MIN_PREFIX_SEQUENCES = 4  # that share it


def pages_for(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens fill."""
    return -(-tokens // PAGE_SIZE)


def kv_cache_shape(pages: int, kv_heads: int, head_dim: int) -> tuple[int, int, int, int, int]:
    """Return the shape of one layer's cache."""
    return (pages, kv_heads, 2, PAGE_SIZE, head_dim)


def kv_scales_shape(pages: int, kv_heads: int) -> tuple[int, int, int, int]:
    """Return the shape of one layer's scales (quantized caches)."""
    return (pages, kv_heads, 2, PAGE_SIZE)
