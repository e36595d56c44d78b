"""The passes, one idea a file; `compiler/pipeline.py` has their order.

base                what every pass takes and returns
normalize           one spelling for what PyTorch spells in several ways
lift_stored_weights, lift_bias,
lift_embedding, lift_rms_norm,                 ATen idioms -> semantic ops; every dependence on a model's spelling lives
lift_rope_angles, lift_rope, lift_lora         in these
fold_multipliers    constant factors of a projection or a norm move into its weights
rotate_values       V's heads rotated by their weights, which costs nothing at run time
smooth_channels     channels after norms and SiLU * mul made alike by calibrated powers of two, at no cost at run time
pack_projections    q/k/v and gate/up become one projection each
shard               one model over several ranks: each has its share of the weights (shard_parts: how one is given its
                    share)
fuse_silu_mul, fuse_add_rms_norm                         two semantic ops -> one
quantize_kv         a quantized KV cache, with or without a Hadamard rotation
center_keys         a calibrated constant per channel is subtracted from the keys of a quantized cache
fuse_rope_append    RoPE -> Hadamard -> quantize -> append, one op
balance_keys        keys and queries of like size before they are quantized, by factors that no score sees
quantize_linears    rowwise int8 or e4m3 on every linear
finer_logits        in int8, logits in fp16 instead of bf16
finer_residual      in int8, the residual stream in fp16 instead of bf16
use_rounded_weights  the weights of these as a file has them, instead of rounded to nearest
quantize_lora       eight-bit adapters, and eight-bit activations for them
fuse_quantize       the quantization of an activation moves into the op that makes it
fuse_all_reduce_norm  partial results of the ranks are added up by the norm that reads them
fuse_decoder_block  the linears between two attentions of a decode step become one launch
fuse_lora_expand    a prompt step's linears add their LoRA deltas themselves
fuse_lora_silu_mul  a decode step's SiLU * mul makes the LoRA delta of gate and up itself
round_lora_ranks    a decode step's other LoRA branches add up and round their ranks once
widen_kv_once       a prompt step's attention reads keys and values that were made fp16 once
quantize_in_blocks  attention and SiLU * mul of a decode step of 17 to 32 tokens quantize by 128 columns, so that
                    nothing waits for a row's maximum
lower_lora          LoRA -> plan, shrink, expand, marked for the side stream

A pass is `def name(graph, context) -> PassReport`: it rewrites the graph in place and says how often it matched and why
it refused the rest.
"""

from .base import Context, PassReport

__all__ = ["Context", "PassReport"]
