"""Operand types, scaling of probabilities and split workspace of the Triton attention kernels.

Products with an 8-bit cache are in fp16, to which e4m3 and int8 convert exactly and cheaply; products with bf16 and
fp32 caches are in the cache's type. A probability (at most 1) is multiplied by V's scale before it is rounded to fp16.
Another factor of 2^8 keeps the result within fp16's range (for V scales between 2^-16 and 2^8); the final division
removes it.
"""

import torch
import triton.language as tl

from ..core.device import workspace
from ..core.dtypes import QUANTIZED_MAX

LOG2_E = 1.4426950408889634
PROBABILITY_SCALE = tl.constexpr(256.0)
LOWEST = tl.constexpr(-1.0e30)  # a finite "minus infinity": exp2(LOWEST - LOWEST) is 1, not NaN
_OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def operand_type(cache_dtype: torch.dtype) -> tl.dtype:
    """Return the type in which P and V are multiplied (and Q and K, unless both are e4m3)."""
    return tl.float16 if cache_dtype in QUANTIZED_MAX else _OPERANDS[cache_dtype]


def chunk_pages(num_blocks: int) -> int:
    """Return the pages that exact decode attention sums before it merges, for block tables of `num_blocks` columns.

    It is 8 for all tables of up to 512 pages. Longer ones have at most 64 chunks, because each needs memory.
    """
    return max(8, -(-num_blocks // 64))


def split_workspace(
    device: torch.device, rows: int, splits: int, group: int, dim: int, key: str = "attention_decode"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the splits' workspace for `rows` (sequence, kv head) pairs: partial, logsumexp and arrivals.

    partial [rows * splits, group, dim] and logsumexp [rows * splits, group] are fp32 and flat, arrivals [rows] int32
    zeros. Kernels with different keys do not share memory.
    """
    parts = rows * splits * group
    planes = workspace(device, f"{key}.partial", 4 * parts * (dim + 1)).view(torch.float32)
    arrivals = workspace(device, f"{key}.arrivals", 4 * rows, zero=True).view(torch.int32)
    return planes, planes[parts * dim :], arrivals
