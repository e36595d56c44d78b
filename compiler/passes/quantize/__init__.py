"""Passes that quantize to eight bits, and passes that make the quantized model more accurate.

rotate_values        rotate the heads of V by their weights
smooth_channels      equalize channels after norms and SiLU * mul by calibrated powers of two
quantize_kv          KV cache in eight bits, with or without a Hadamard rotation
center_keys          subtract a calibrated constant per channel from cached keys
balance_keys         scale keys and queries to equal magnitudes before they are quantized
quantize_linears     rowwise int8 or e4m3 on every linear
finer_logits         logits in fp16 instead of bf16 (int8 only)
finer_residual       residual stream in fp16 instead of bf16 (int8 only)
use_rounded_weights  weights rounded by calibration instead of to nearest
"""
