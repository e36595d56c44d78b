"""Mixtures of experts. A pair is a token and one of its experts; pair p = t * top_k + j is choice j of token t.

route           experts of each token and their weights
plan            pairs sorted by expert, or by adapter and expert, in tiles
expert_linear   one linear of each pair's expert, the semantic ops (16-bit and eight-bit)
expert_lora     LoRA of each pair's adapter and expert, the semantic op
combine         the weighted sum of a token's pairs
grouped_linear  one linear of each pair's group, of pairs sorted by group (kernel_triton: its kernel)
grouped_linear_8bit_silu_mul  gate and up in one launch with SiLU(gate) * up
"""

from . import combine, expert_linear, expert_lora, grouped_linear, grouped_linear_8bit_silu_mul, plan, route
