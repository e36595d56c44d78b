"""`quantize_rowwise`: activations to e4m3 or int8 with one fp32 scale per row (token).

scale = max(amax(|row|), 1e-12) / 448 and q = clamp(x / scale, +-448) in e4m3; in int8 / 127, to the nearest integer.
The kernel multiplies by 1 / scale, so a value on a rounding edge may differ from the reference by one step.

With `rotate`, each block of `rotate` adjacent columns (a power of two; 0: none) is first multiplied by a normalised
Hadamard matrix, which is symmetric and its own inverse. A product with equally rotated weights is unchanged. A row's
largest value becomes smaller, and so do all int8 steps of the row (QuaRot, arXiv 2404.00456). e4m3 steps depend on each
value, so rotation has no advantage there. Blocks of 8 are computed within a thread; blocks of 128 also need shuffles,
and help most if few values of a row are far larger than the others.
"""

import math
from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.dtypes import QUANTIZED_MAX
from ..core.registry import register
from ..core.triton_support import (
    butterflies,
    in_fp32,
    next_power_of_2,
    pdl_options,
    pdl_start,
    require_contiguous,
    rotate_columns,
    row_scale,
    to_eight_bits,
)
from .hadamard import planes
from .hadamard import reference as hadamard_reference

E4M3 = torch.float8_e4m3fn
NORM_ROTATES = 8  # columns of a rotated block of a norm's result
SILU_ROTATES = 128  # columns of a rotated block of SiLU * mul's result
MANY_ROWS = 1024  # from here on fewer threads per row are faster (H200)


def to_steps(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 values / scale, saturated and rounded to e4m3 or int8."""
    most = QUANTIZED_MAX[dtype]
    steps = (values / scale).clamp_(-most, most)
    return (steps.round_() if dtype == torch.int8 else steps).to(dtype)


def rotated_width(width: int, rotate: int) -> int:
    """Return the columns of a rotated block: the largest power of two up to `rotate` that divides `width` (1: none)."""
    return math.gcd(width, rotate) if rotate else 1


def rotate_blocks(x: torch.Tensor, rotate: int) -> torch.Tensor:
    """Rotate each block of `rotated_width(K, rotate)` columns of x [..., K], in fp32."""
    block = rotated_width(x.shape[-1], rotate)
    return x.float() if block == 1 else hadamard_reference(x.float().unflatten(-1, (-1, block))).flatten(-2)


def reference(x: torch.Tensor, dtype: torch.dtype = E4M3, rotate: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q [..., K] e4m3 or int8, scale [...] fp32) of x [..., K], any float dtype."""
    block = rotated_width(x.shape[-1], rotate)
    values = x.float() if block == 1 else planes(x.unflatten(-1, (-1, block)))  # planes: [block, ..., K / block]
    largest = values.abs() if block == 1 else values.abs().amax(0)
    largest = largest.amax(-1).clamp_min(1e-12)
    scale = largest / largest.new_full((), QUANTIZED_MAX[dtype])  # a GPU multiplies by the reciprocal of a number
    steps = to_steps(values, scale.unsqueeze(-1), dtype)
    return (steps if block == 1 else steps.movedim(0, -1).contiguous().flatten(-2)), scale


def fake(x: torch.Tensor, dtype: torch.dtype = E4M3, rotate: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


@triton.jit
def store_quantized_row(
    values, q, scale, row, column, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr
):
    """Quantize one whole row of fp32 values [BLOCK] (zeros outside) to q's dtype and store it with its scale.

    ROTATE: columns of a rotated block, or 1.
    """
    values = rotate_columns(values, BLOCK, ROTATE)
    step = row_scale(tl.max(tl.abs(values), axis=0), q.dtype.element_ty)
    tl.store(q + row * WIDTH + column, to_eight_bits(values * (1.0 / step), q.dtype.element_ty), mask=inside)
    tl.store(scale + row, step)


@triton.jit
def quarter_columns(BLOCK: tl.constexpr):
    """Return the columns [BLOCK / 128, 32] of the first quarter of each block of 128.

    Columns of the other quarters are larger by 32, 64 and 96. A rotation of 128 columns has seven stages. On four such
    tensors two stages combine whole tensors, and three are within a thread (with 16 adjacent bytes of a row). The other
    two need shuffles, with a quarter of the values each.
    """
    return (tl.arange(0, BLOCK // 128) * 128)[:, None] + tl.arange(0, 32)[None, :]


@triton.jit
def _rotate_quarter(x, BLOCK: tl.constexpr):
    """Run the five stages within a quarter."""
    return tl.reshape(butterflies(tl.reshape(x, (BLOCK // 4,)), BLOCK // 4, 32), (BLOCK // 128, 32))


@triton.jit
def store_quantized_quarters(
    first, second, third, fourth, q, scale, row, column, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate by 128 columns, quantize and store a row in quarters (`quarter_columns`); see `store_quantized_row`."""
    first, second, third, fourth = (
        _rotate_quarter(first, BLOCK),
        _rotate_quarter(second, BLOCK),
        _rotate_quarter(third, BLOCK),
        _rotate_quarter(fourth, BLOCK),
    )
    first, second, third, fourth = first + second, first - second, third + fourth, third - fourth
    first, second, third, fourth = first + third, second + fourth, first - third, second - fourth
    most = tl.maximum(tl.maximum(tl.abs(first), tl.abs(second)), tl.maximum(tl.abs(third), tl.abs(fourth)))
    norm = 128**-0.5
    step = row_scale(tl.max(tl.max(most, axis=1), axis=0) * norm, q.dtype.element_ty)
    factor = norm / step
    target = q + row * WIDTH + column
    tl.store(target, to_eight_bits(first * factor, q.dtype.element_ty), mask=inside)
    tl.store(target + 32, to_eight_bits(second * factor, q.dtype.element_ty), mask=inside)
    tl.store(target + 64, to_eight_bits(third * factor, q.dtype.element_ty), mask=inside)
    tl.store(target + 96, to_eight_bits(fourth * factor, q.dtype.element_ty), mask=inside)
    tl.store(scale + row, step)


@triton.jit
def _quantize_kernel(x, q, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    pdl_start(PDL)
    if WIDTH <= BLOCK and ROTATE == 128:
        column = quarter_columns(BLOCK)
        inside = column < WIDTH
        source = x + row * WIDTH + column
        first = in_fp32(tl.load(source, mask=inside, other=0.0))
        second = in_fp32(tl.load(source + 32, mask=inside, other=0.0))
        third = in_fp32(tl.load(source + 64, mask=inside, other=0.0))
        fourth = in_fp32(tl.load(source + 96, mask=inside, other=0.0))
        store_quantized_quarters(first, second, third, fourth, q, scale, row, column, inside, WIDTH, BLOCK)
    elif WIDTH <= BLOCK:
        inside = column < WIDTH
        values = in_fp32(tl.load(x + row * WIDTH + column, mask=inside, other=0.0))
        store_quantized_row(values, q, scale, row, column, inside, WIDTH, BLOCK, ROTATE)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            values = in_fp32(tl.load(x + row * WIDTH + start + column, mask=start + column < WIDTH, other=0.0))
            largest = tl.maximum(largest, tl.abs(rotate_columns(values, BLOCK, ROTATE)))
        step = row_scale(tl.max(largest, axis=0), q.dtype.element_ty)
        tl.store(scale + row, step)
        for start in range(0, WIDTH, BLOCK):
            inside = start + column < WIDTH
            values = in_fp32(tl.load(x + row * WIDTH + start + column, mask=inside, other=0.0))
            steps = to_eight_bits(rotate_columns(values, BLOCK, ROTATE) * (1.0 / step), q.dtype.element_ty)
            tl.store(q + row * WIDTH + start + column, steps, mask=inside)


def row_block(width: int) -> tuple[int, int]:
    """Return (BLOCK, num_warps) for one CTA per row: 8 to 32 elements per thread, at most 16384 per CTA."""
    block = min(next_power_of_2(width), 16384)
    return block, min(max(block // 256, 1), 16)


def launch(
    x: torch.Tensor,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (q, scale) by one CTA per row; rows wider than 16384 are read twice. Ignores `sm_budget`."""
    require_contiguous("quantize_rowwise", x=x)
    if x.numel() == 0:
        return
    width = x.shape[-1]
    rows, rotated = x.numel() // width, rotated_width(width, rotate)
    block, warps = row_block(width)
    if rotated == 128 and rows >= MANY_ROWS:
        warps = min(warps, 8)
    q, scale = out
    _quantize_kernel[(rows,)](
        x, q, scale, WIDTH=width, BLOCK=block, ROTATE=rotated, num_warps=warps, **pdl_options(pdl)
    )


quantize_rowwise = register("quantize_rowwise", reference, fake, launch, family="quantize")
