"""LoRA for a batch of mixed adapters.

lora             the semantic op: what a graph means before a pass lowers it
plan             which tokens meet which adapter, once a step
shrink           first half: split-K planes of x A^T
expand           second half: the planes added up, times B
rounded          the same from ranks that are added up and rounded once
silu_mul_lora    SiLU(gate) * up that makes the delta of gate and up itself
"""

from . import expand, lora, plan, shrink, silu_mul_lora
from . import expand_rounded as rounded
