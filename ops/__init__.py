"""Floor 1: one file per op, each with schema, fake, reference (the specification), kernel and launch.

append_kv        k and v into the paged KV cache
argmax           greedy tokens
decoder_block    o -> gate_up -> down -> the next q/k/v of a decode step as one persistent launch (kernel: decoder_block_gluon)
decoder_block_lora  the same with the LoRA branches of its linears inside (kernel: decoder_block_lora_gluon)
embedding        rows of the embedding table
hadamard         Walsh-Hadamard transform of each head
linear_8bit       y = x W^T, rowwise e4m3 or int8, + delta and residual (kernels: kernel_gluon, kernel_triton, _wide, _large, _prefill)
linear_8bit_lora  y of a prompt step with its LoRA branch added by the tiles (kernel: kernel_lora_large)
linear_8bit_silu_mul  y of gate and up, with SiLU(gate) * up as its result
lora             low-rank deltas of a batch of mixed adapters (semantic)
lora_active      the adapters of each 128 tokens, for linear_8bit_lora
lora_expand      LoRA's second half: summed planes times B
lora_expand_rounded  the same from ranks that lora_round has rounded
lora_groups      the adapters of a decode step's tokens, for decoder_block_lora
lora_plan        tokens sorted by adapter and cut into tiles
lora_round       LoRA's first half added up and rounded to int8, for lora_expand_rounded and ops that make their delta themselves
lora_shrink      LoRA's first half: split-K planes of x times A
paged_attention  causal attention over the paged KV cache, + quantization (kernels: attention_prefill, attention_decode, both in _gluon, _prefill_wide_gluon)
paged_attention_blocks  decode attention quantized for decoder_block
quantize         activations to e4m3 or int8, one scale per token
quantize_blocks  activations to e4m3 or int8, one scale per token and 128 columns
rms_norm         RMSNorm with residual sum and quantization
rope             rotary position embedding
rope_angles      cos and sin of each token's rotary angles
rope_append      RoPE, Hadamard and KV append of a packed qkv row in one launch
sample           temperature, min-p, top-k, top-p, Gumbel-max; top_logprobs
silu_mul         SiLU(gate) * up with delta and quantization
silu_mul_blocks  the same, one scale per token and 128 columns
silu_mul_lora    SiLU(gate) * up with the LoRA delta of gate and up made inside
widen_kv         pages of an int8 KV cache in fp16, each once, for attention of many queries
widen_plan       which sequences of a step are widened, and where they lie then
"""
from .attention import append_kv, paged_attention, paged_attention_blocks, rope, rope_angles, rope_append, widen_kv, widen_plan
from .core.kv_layout import PAGE_SIZE
from .decoder_block import decoder_block, lora_groups
from .decoder_block import lora as decoder_block_lora
from .linear import linear_8bit, linear_8bit_lora, linear_8bit_silu_mul
from .lora import active as lora_active
from .lora import expand as lora_expand
from .lora import expand_rounded as lora_expand_rounded
from .lora import lora, silu_mul_lora
from .lora import plan as lora_plan
from .lora import rounded as lora_round
from .lora import shrink as lora_shrink
from .rows import argmax, embedding, hadamard, quantize, quantize_blocks, rms_norm, sample, silu_mul, silu_mul_blocks
