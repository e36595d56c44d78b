"""`quantize_blocks`: activations to e4m3 or int8 with one fp32 scale per token and 128 columns.

These scales are finer than one per row, and no block needs another block's maximum. Scales are stored by block,
[K / 128, P] for T tokens with P = `padded_scales(T)`, so that the scales of a block are one TMA box. Scales past T are
zero.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.dtypes import QUANTIZED_MAX
from ..core.registry import register
from ..core.triton_support import (
    next_power_of_2,
    pdl_options,
    pdl_start,
    require_contiguous,
    rotate_columns,
    row_scale,
    to_eight_bits,
)
from .quantize import E4M3, rotate_blocks, to_steps

BLOCK = 128
LEAST_SCALES = 32
BLOCKS_PER_CTA = 8


def padded_scales(tokens: int) -> int:
    """Return the number of scales per block of columns for `tokens` tokens: a power of two, at least 128 bytes."""
    return max(LEAST_SCALES, next_power_of_2(tokens))


def reference(x: torch.Tensor, dtype: torch.dtype = E4M3, rotate: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q [T, K] e4m3 or int8, scale [K / 128, P] fp32, zero past T) of x [T, K], K a multiple of 128.

    Rounding and `rotate` are as in `quantize_rowwise`.
    """
    tokens, width = x.shape
    blocks = rotate_blocks(x, rotate).view(tokens, width // BLOCK, BLOCK)
    scale = blocks.abs().amax(-1).clamp_min(1e-12) / QUANTIZED_MAX[dtype]
    q = to_steps(blocks, scale.unsqueeze(-1), dtype).view(tokens, width)
    return q, torch.nn.functional.pad(scale.t(), (0, padded_scales(tokens) - tokens)).contiguous()


def fake(x: torch.Tensor, dtype: torch.dtype = E4M3, rotate: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    if x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(f"quantize_blocks: x {tuple(x.shape)} must be [T, K] with K a multiple of {BLOCK}")
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(
        (x.shape[1] // BLOCK, padded_scales(int(x.shape[0]))), dtype=torch.float32
    )


def dequantize_blocks(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values [T, K] of q and its scales."""
    tokens, width = q.shape
    return (q.float().view(tokens, width // BLOCK, BLOCK) * scale[:, :tokens].t().unsqueeze(-1)).view(tokens, width)


@triton.jit
def store_quantized_blocks(
    values, q, scale, token, tokens, first, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """Quantize fp32 values [BLOCKS * 128] of one token to q's dtype, from block `first` on.

    Blocks past WIDTH are not stored; scales past the last token are zero.
    """
    block = first + tl.arange(0, BLOCKS)
    at = token.to(tl.int64) * WIDTH + block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = block < WIDTH // 128
    values = tl.reshape(rotate_columns(values, BLOCKS * 128, ROTATE), (BLOCKS, 128))
    step = row_scale(tl.max(tl.abs(values), axis=1), q.dtype.element_ty)
    tl.store(q + at, to_eight_bits(values * (1.0 / step)[:, None], q.dtype.element_ty), mask=inside[:, None])
    tl.store(scale + block * PADDED + token, step, mask=inside)
    if token == tokens - 1:
        past = tl.arange(0, PADDED)
        tl.store(
            scale + block[:, None] * PADDED + past[None, :],
            tl.zeros((BLOCKS, PADDED), tl.float32),
            mask=inside[:, None] & (past >= tokens)[None, :],
        )


@triton.jit
def _quantize_blocks_kernel(
    x, q, scale, tokens, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, ROTATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    first = tl.program_id(1) * BLOCKS
    column = first * 128 + tl.arange(0, BLOCKS * 128)
    pdl_start(PDL)
    values = tl.load(x + token.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    store_quantized_blocks(values, q, scale, token, tokens, first, WIDTH, PADDED, BLOCKS, ROTATE)


def launch(
    x: torch.Tensor,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (q, scale). Ignores `sm_budget`: the launch is small."""
    require_contiguous("quantize_blocks", x=x)
    tokens, width = x.shape
    if x.numel() == 0:
        return
    blocks = min(BLOCKS_PER_CTA, next_power_of_2(width // BLOCK))
    grid = (tokens, triton.cdiv(width // BLOCK, blocks))
    form = {
        "WIDTH": width,
        "PADDED": padded_scales(tokens),
        "BLOCKS": blocks,
        "ROTATE": max(1, rotate),
        "num_warps": 4,
        **pdl_options(pdl),
    }
    _quantize_blocks_kernel[grid](x, *out, tokens, **form)


quantize_blocks = register("quantize_blocks", reference, fake, launch, family="quantize")
