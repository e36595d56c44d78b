"""Ops on one row at a time.

rms_norm               RMSNorm, with residual sum and quantization
combine_rms_norm       the same after the weighted sum of a token's experts (weighted_rows)
silu_mul               SiLU(gate) * up, with delta and quantization (silu_mul_blocks: per 128 columns)
quantize               rows to e4m3 or int8 with one scale per token (quantize_blocks: per 128 columns)
hadamard               Walsh-Hadamard transform of each head
embedding              rows of the embedding table
residual_values        unscaled values of a residual stream
argmax                 greedy tokens
vocab_parallel_argmax  `best_of_part`: the best token of a rank's part of the vocabulary, as a comparable key
sample                 temperature, min-p, top-k, top-p, Gumbel-max; log-probabilities
token_masks            masks of allowed tokens, one bit per token, for argmax and sample
"""

from . import (
    argmax,
    combine_rms_norm,
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
from . import (
    vocab_parallel_argmax as best_of_part,
)
