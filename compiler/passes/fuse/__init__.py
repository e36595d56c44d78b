"""Passes that fuse several ops into one.

pack_projections    q/k/v and gate/up become one projection each
fuse_silu_mul       SiLU and multiply; in decode steps with the gate_up linear
fuse_add_rms_norm   residual add and RMSNorm
fuse_rope_append    RoPE -> Hadamard -> quantize -> KV append
fuse_quantize       activation quantization moves into the op that produces the activation
fuse_decoder_block  the linears between two attentions of a decode step become one launch
quantize_in_blocks  attention and SiLU * mul of decode steps of 17 to 32 tokens quantize by 128 columns
share_prefix        attention of a decode step reads pages of several sequences once
widen_kv_once       attention of a prompt step converts keys and values to fp16 once
"""
