"""Ops that work on one row at a time.

rms_norm         RMSNorm, with residual sum and quantization
silu_mul         SiLU(gate) * up, with delta and quantization (silu_mul_blocks: by blocks of 128 columns)
quantize         rows to e4m3 or int8 with one scale a token (quantize_blocks: by blocks of 128 columns)
hadamard         Walsh-Hadamard transform of each head
embedding        rows of the embedding table
residual_values  a residual stream as plain values
argmax           greedy tokens
best_of_part     the best token of a rank's part of the vocabulary
sample           temperature, min-p, top-k, top-p, Gumbel-max; log-probabilities
token_masks      which tokens a row may get, one bit a token, for the last three
"""

from . import (
    argmax,
    best_of_part,
    embedding,
    hadamard,
    quantize,
    quantize_blocks,
    residual_values,
    rms_norm,
    sample,
    silu_mul,
    silu_mul_blocks,
)
