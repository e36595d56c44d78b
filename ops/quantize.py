"""`quantize_rowwise`: activations to e4m3 with one fp32 scale per row (token).

scale = max(amax(|row|), 1e-12) / 448 and q = clamp(x / scale, +-448) in e4m3. The kernel multiplies by 1 / scale, so a value that lies
on a rounding edge may land one e4m3 step from the reference's.
"""
from typing import Optional

import torch
import triton
import triton.language as tl

from .registry import register
from .triton_support import next_power_of_2, pdl_options, pdl_start, require_contiguous, row_scale, to_e4m3

E4M3 = torch.float8_e4m3fn


def quantize_rowwise_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K], any float dtype -> (q [..., K] e4m3, scale [...] fp32)."""
    values = x.float()
    scale = values.abs().amax(-1).clamp_min(1e-12) / 448.0
    return (values / scale.unsqueeze(-1)).clamp(-448.0, 448.0).to(E4M3), scale


def quantize_rowwise_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unfilled (q, scale) for x [..., K]."""
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)


@triton.jit
def store_quantized_row(values, q, scale, row, column, inside, WIDTH: tl.constexpr):
    """Quantize one whole row of fp32 values (zeros outside) and store it with its scale."""
    step = row_scale(tl.max(tl.abs(values), axis=0))
    tl.store(q + row * WIDTH + column, to_e4m3(values * (1.0 / step)), mask=inside)
    tl.store(scale + row, step)


@triton.jit
def _quantize_kernel(x, q, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    pdl_start(PDL)
    if WIDTH <= BLOCK:
        inside = column < WIDTH
        values = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        store_quantized_row(values, q, scale, row, column, inside, WIDTH)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            values = tl.load(x + row * WIDTH + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(values))
        step = row_scale(tl.max(largest, axis=0))
        tl.store(scale + row, step)
        for start in range(0, WIDTH, BLOCK):
            inside = start + column < WIDTH
            values = tl.load(x + row * WIDTH + start + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(q + row * WIDTH + start + column, to_e4m3(values * (1.0 / step)), mask=inside)


def row_block(width: int) -> tuple[int, int]:
    """(BLOCK, num_warps) of a kernel in which one CTA holds one row: 8 to 32 elements a thread, at most 16384 a CTA."""
    block = min(next_power_of_2(width), 16384)
    return block, min(max(block // 256, 1), 16)


def quantize_rowwise_launch(x: torch.Tensor, *, out: tuple[torch.Tensor, ...], sm_budget: Optional[int] = None, pdl: bool = False) -> None:
    """Fill `out` = (q, scale): one CTA a row, rows wider than 16384 read twice. Too small to heed `sm_budget`."""
    require_contiguous("quantize_rowwise", x=x)
    if x.numel() == 0:
        return
    block, warps = row_block(x.shape[-1])
    q, scale = out
    _quantize_kernel[(x.numel() // x.shape[-1],)](x, q, scale, WIDTH=x.shape[-1], BLOCK=block, num_warps=warps, **pdl_options(pdl))


quantize_rowwise = register("quantize_rowwise", quantize_rowwise_reference, quantize_rowwise_fake, quantize_rowwise_launch)
