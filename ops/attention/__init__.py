"""Attention over the paged KV cache, and every op that reads or writes the cache.

paged_attention         the op and its quantized form; chooses a kernel
paged_attention_blocks  decode attention quantized by blocks of 128 columns, for `decoder_block`
decode                  Triton kernel for one query row per sequence, or a few with drafts
decode_gluon            the same for Hopper (its loop: decode_gluon_softmax; its end: decode_gluon_merge)
decode_exact            the same, with bits that do not depend on the batch
prefill                 Triton kernel for query chunks
prefill_gluon           the same for Hopper over an 8-bit cache (shared parts: prefill_gluon_tiles, which also splits
                        long contexts of few tiles, prefill_gluon_softmax and prefill_gluon_merge)
prefill_wide_gluon      the same over keys and values that widen_kv has converted to fp16
numerics                operand types and scaling of probabilities of the Triton kernels
widen_kv                converts int8 pages to fp16 once per layer; selects the sequences once per step
prefix_attention        decode attention to pages that sequences share, read once; finds them once per step
append_kv               writes k and v to the cache
rope                    rotary position embedding, and its angles once per step
rope_append             RoPE, Hadamard transform, quantization and append in one launch
"""

from . import append_kv, paged_attention, paged_attention_blocks, prefix_attention, rope, rope_append, widen_kv
