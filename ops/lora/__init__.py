"""LoRA for a batch of mixed adapters.

lora             the semantic op, which a pass lowers to the others
plan             sorts a step's tokens by adapter, once per step
shrink           first half: split-K planes of x A^T
expand           second half: the sum of the planes, times B
expand_rounded   the same with planes summed and rounded to int8 once (`lora_round`, `lora_expand_rounded`)
adjust           gain and shift of an adapter on a linear's result (DoRA, trained biases)
silu_mul_lora    SiLU(gate) * up fused with the delta of gate and up
"""

from . import adjust, expand, lora, plan, shrink, silu_mul_lora
from . import expand_rounded as rounded
