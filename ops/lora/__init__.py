"""LoRA for a batch of mixed adapters.

lora             the semantic op: what a graph means before a pass lowers it
plan, active     which tokens meet which adapter, once a step
shrink           first half: split-K planes of x A^T
expand           second half: the planes added up, times B
rounded, expand_rounded  the same from ranks that were added up and rounded once (parts: rounded_pieces)
silu_mul_lora    SiLU(gate) * up that makes the delta of gate and up itself
"""

from . import active, expand, expand_rounded, lora, plan, rounded, shrink, silu_mul_lora
