"""Passes for LoRA branches.

quantize_lora       adapters and their activations in eight bits
lower_lora          LoRA -> plan, shrink and expand on the side stream
fuse_lora_expand    linears of a prompt step add their LoRA deltas
fuse_lora_silu_mul  SiLU * mul of a decode step computes the LoRA delta of gate and up
round_lora_ranks    other LoRA branches of a decode step sum and round their ranks once
"""
