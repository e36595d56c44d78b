"""The paged KV cache's layout, shared by every op that touches it.

cache   [page][kv head][K | V][token][head_dim]    e4m3, int8 or the model's dtype; in e4m3 one page and head is one 16
        KB block
scales  [page][kv head][K | V][token]              fp32, with e4m3 and int8 caches only: value = stored * scale
A slot is `page * PAGE_SIZE + offset`; slot -1 stands for a padding token and is never written.
"""

PAGE_SIZE = 64
KEY, VALUE = 0, 1


def pages_for(tokens: int) -> int:
    """How many pages `tokens` tokens fill."""
    return -(-tokens // PAGE_SIZE)


def kv_cache_shape(pages: int, kv_heads: int, head_dim: int) -> tuple[int, int, int, int, int]:
    """Shape of one layer's cache."""
    return (pages, kv_heads, 2, PAGE_SIZE, head_dim)


def kv_scales_shape(pages: int, kv_heads: int) -> tuple[int, int, int, int]:
    """Shape of one layer's scales (quantized caches)."""
    return (pages, kv_heads, 2, PAGE_SIZE)
