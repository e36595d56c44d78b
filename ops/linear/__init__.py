"""8-bit linears: one file per op, one file per kernel.

linear_8bit           y = x W^T + delta + residual; chooses a kernel
linear_8bit_silu_mul  gate and up in one launch with SiLU(gate) * up
linear_8bit_lora      a prompt step's linear with the LoRA delta in its tiles
kernel_triton         Triton, any shape
kernel_gluon          Gluon, decode steps: weights are loaded through a ring of buffers
kernel_wide           Gluon, 65 tokens and more: tokens are the M operand
kernel_large          Gluon, prompt steps in int8 (kernel_lora_large: with LoRA)
scaled_mm             torch._scaled_mm, prompt steps in e4m3
kernel_selection      kernel and tiles of each shape (tables: tuned/)
"""

from . import linear_8bit, linear_8bit_lora, linear_8bit_silu_mul
