"""Attention over the paged KV cache, and every op that writes or reads the cache.

paged_attention         the semantic op and its quantized form; picks a kernel
paged_attention_blocks  decode attention quantized by blocks of 128 columns, for `decoder_block`
decode, decode_gluon    kernels for one query row a sequence, or the few of a step with drafts: Triton, and Gluon for
                        Hopper (parts: decode_gluon_pieces, decode_gluon_merge)
prefill, prefill_gluon, prefill_wide_gluon  kernels for many query rows (parts: prefill_gluon_pieces)
pieces                  what both Triton kernels share
widen_kv                pages of an int8 cache made fp16 once a layer, and which, once a step
append_kv               k and v into the cache
rope                    rotary position embedding, and its angles once a step
rope_append             RoPE, Hadamard transform, quantization and append in one launch
"""

from . import append_kv, paged_attention, paged_attention_blocks, rope, rope_append, widen_kv
