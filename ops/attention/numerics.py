"""What the Triton attention kernels share: operand types, exact dots, and the scaling of probabilities.

An 8-bit cache is multiplied in fp16, into which e4m3 and int8 go exactly and cheaply; a bf16 or fp32 cache in its own
type. A probability (at most 1) takes V's scale with it before it is rounded to fp16: 2^8 on top keeps both clear of
fp16's ends (V's scales between 2^-16 and 2^8), and the last division takes it out again.
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
    """The type in which P and V are multiplied (and Q and K too, unless both are e4m3)."""
    return tl.float16 if cache_dtype in QUANTIZED_MAX else _OPERANDS[cache_dtype]


def split_workspace(
    device: torch.device, rows: int, splits: int, group: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What splits of `rows` (sequence, kv head) pairs exchange: partial [rows * splits, group, dim] and logsumexp [rows
    * splits, group] fp32, flat, and arrivals [rows] int32, at zero."""
    parts = rows * splits * group
    planes = workspace(device, "attention_decode.partial", 4 * parts * (dim + 1)).view(torch.float32)
    arrivals = workspace(device, "attention_decode.arrivals", 4 * rows, zero=True).view(torch.int32)
    return planes, planes[parts * dim :], arrivals
