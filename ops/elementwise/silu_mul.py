"""SiLU(gate) * up over a packed [gate | up] row, with a LoRA delta before and rowwise quantization after.

Sums, SiLU and product are fp32 with one rounding at the end; `silu_mul_quant` quantizes the rounded value to e4m3 or
int8. `keep`: also return the unquantized h (for the LoRA shrink of the down projection).
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.device import H200_SMS, workspace
from ..core.registry import register
from ..core.reproducible_sums import silu_in_fp32
from ..core.triton_support import (
    INTERP,
    cdiv,
    in_fp32,
    next_power_of_2,
    pdl_options,
    pdl_start,
    require_contiguous,
    rotate_columns,
    rounded_to,
    row_scale,
    to_eight_bits,
)
from .quantize import (
    E4M3,
    quarter_columns,
    rotated_width,
    row_block,
    store_quantized_quarters,
    store_quantized_row,
)
from .quantize import (
    reference as quantize_rowwise_reference,
)

SHARED_ROWS = 64
SHARED_WIDTH = 8192  # with fewer columns one CTA per row is as fast as two launches
CHUNK = 1024
MOST_REGISTERS = 64  # per thread: an SM holds two rows of 16 warps


def silu_mul_reference(gate_up: torch.Tensor, delta: Optional[torch.Tensor]) -> torch.Tensor:
    """Return SiLU(gate) * up [..., I] of gate_up + delta [..., 2I]; the first half of a row is the gate."""
    total = gate_up.float() if delta is None else gate_up.float() + delta.float()
    gate, up = total.chunk(2, dim=-1)
    return (silu_in_fp32(gate) * up).to(gate_up.dtype)


def silu_mul_quant_reference(
    gate_up: torch.Tensor,
    delta: Optional[torch.Tensor],
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (h [..., I], q [..., I] e4m3 or int8, scale fp32 [...]), quantized as in `quantize_rowwise`.

    h is [0, I] unless `keep`. `exact`: a row's bits do not depend on the number of rows, also on a GPU.
    """
    h = silu_mul_reference(gate_up, delta)
    q, scale = quantize_rowwise_reference(h, dtype, rotate)
    return h if keep else h.new_empty(0, h.shape[-1]), q, scale


def silu_mul_fake(gate_up: torch.Tensor, delta: Optional[torch.Tensor]) -> torch.Tensor:
    """Return an empty result."""
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def silu_mul_quant_fake(
    gate_up: torch.Tensor, delta: Optional[torch.Tensor], keep: bool, dtype: torch.dtype = E4M3, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty results."""
    h = silu_mul_fake(gate_up, delta) if keep else gate_up.new_empty((0, gate_up.shape[-1] // 2))
    shape = gate_up.shape[:-1]
    q = gate_up.new_empty((*shape, gate_up.shape[-1] // 2), dtype=dtype)
    return h, q, gate_up.new_empty(shape, dtype=torch.float32)


@triton.jit
def silu(x):
    """Return x * sigmoid(x) of fp32."""
    if INTERP:
        return x / (1.0 + tl.exp(-x))
    # both approximations are precise to 2**-22; a library's exp and division take twice as many instructions
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 y;
                 mul.f32 y, $1, 0fBFB8AA3B;
                 ex2.approx.ftz.f32 y, y;
                 add.f32 y, y, 0f3F800000;
                 rcp.approx.ftz.f32 y, y;
                 mul.f32 $0, $1, y; }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _silu_mul_values(gate_up, delta, row, column, inside, HAS_DELTA: tl.constexpr, WIDTH: tl.constexpr):
    """Return h of some columns of one row, rounded to the model's dtype, in fp32."""
    at = row * (2 * WIDTH) + column
    gate = in_fp32(tl.load(gate_up + at, mask=inside, other=0.0))
    up = in_fp32(tl.load(gate_up + at + WIDTH, mask=inside, other=0.0))
    if HAS_DELTA:
        gate += in_fp32(tl.load(delta + at, mask=inside, other=0.0))
        up += in_fp32(tl.load(delta + at + WIDTH, mask=inside, other=0.0))
    return rounded_to(silu(gate) * up, gate_up.dtype.element_ty)


@triton.jit
def _silu_mul_kernel(
    gate_up, delta, h, HAS_DELTA: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    pdl_start(PDL)
    values = _silu_mul_values(gate_up, delta, row, column, inside, HAS_DELTA, WIDTH)
    tl.store(h + row * WIDTH + column, values.to(h.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_quant_kernel(
    gate_up, delta, h, q, scale, HAS_DELTA: tl.constexpr, KEEP: tl.constexpr, ROTATE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    pdl_start(PDL)
    if WIDTH <= BLOCK and ROTATE == 128:
        column = quarter_columns(BLOCK)
        inside = column < WIDTH
        first = _silu_mul_values(gate_up, delta, row, column, inside, HAS_DELTA, WIDTH)
        second = _silu_mul_values(gate_up, delta, row, column + 32, inside, HAS_DELTA, WIDTH)
        third = _silu_mul_values(gate_up, delta, row, column + 64, inside, HAS_DELTA, WIDTH)
        fourth = _silu_mul_values(gate_up, delta, row, column + 96, inside, HAS_DELTA, WIDTH)
        if KEEP:
            kept = h + row * WIDTH + column
            tl.store(kept, first.to(h.dtype.element_ty), mask=inside)
            tl.store(kept + 32, second.to(h.dtype.element_ty), mask=inside)
            tl.store(kept + 64, third.to(h.dtype.element_ty), mask=inside)
            tl.store(kept + 96, fourth.to(h.dtype.element_ty), mask=inside)
        store_quantized_quarters(first, second, third, fourth, q, scale, row, column, inside, WIDTH, BLOCK)
    elif WIDTH <= BLOCK:
        inside = column < WIDTH
        values = _silu_mul_values(gate_up, delta, row, column, inside, HAS_DELTA, WIDTH)
        if KEEP:
            tl.store(h + row * WIDTH + column, values.to(h.dtype.element_ty), mask=inside)
        store_quantized_row(values, q, scale, row, column, inside, WIDTH, BLOCK, ROTATE)
    else:  # too wide for one CTA's registers: computed twice, with the same bits
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            values = _silu_mul_values(gate_up, delta, row, start + column, start + column < WIDTH, HAS_DELTA, WIDTH)
            if KEEP:
                tl.store(h + row * WIDTH + start + column, values.to(h.dtype.element_ty), mask=start + column < WIDTH)
            largest = tl.maximum(largest, tl.abs(rotate_columns(values, BLOCK, ROTATE)))
        step = row_scale(tl.max(largest, axis=0), q.dtype.element_ty)
        tl.store(scale + row, step)
        for start in range(0, WIDTH, BLOCK):
            inside = start + column < WIDTH
            values = _silu_mul_values(gate_up, delta, row, start + column, inside, HAS_DELTA, WIDTH)
            steps = to_eight_bits(rotate_columns(values, BLOCK, ROTATE) * (1.0 / step), q.dtype.element_ty)
            tl.store(q + row * WIDTH + start + column, steps, mask=inside)


@triton.jit
def _silu_mul_chunk_kernel(
    gate_up, delta, h, largest, chunks, HAS_DELTA: tl.constexpr, ROTATE: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute h[token, CHUNK columns] and largest[token, chunk] = max |h| of h, rotated in blocks of ROTATE columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < WIDTH
    pdl_start(PDL)
    values = _silu_mul_values(gate_up, delta, row, column, inside, HAS_DELTA, WIDTH)
    tl.store(h + row * WIDTH + column, values.to(h.dtype.element_ty), mask=inside)
    tl.store(largest + row * chunks + tl.program_id(1), tl.max(tl.abs(rotate_columns(values, CHUNK, ROTATE)), axis=0))


@triton.jit
def _quantize_chunk_kernel(
    h, largest, q, scale, chunks, ROTATE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantize q[token, CHUNK columns]; every program of a token computes the same scale, the first one stores it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = tl.arange(0, CHUNKS)
    inside = column < WIDTH
    pdl_start(PDL)
    most = tl.load(largest + row * chunks + place, mask=place < chunks, other=0.0)
    values = rotate_columns(in_fp32(tl.load(h + row * WIDTH + column, mask=inside, other=0.0)), CHUNK, ROTATE)
    step = row_scale(tl.max(most, axis=0), q.dtype.element_ty)
    tl.store(q + row * WIDTH + column, to_eight_bits(values * (1.0 / step), q.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(scale + row, step)


def silu_mul_launch(
    gate_up: torch.Tensor,
    delta: Optional[torch.Tensor],
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (h,). Ignores `sm_budget`: the launch is small."""
    require_contiguous("silu_mul", gate_up=gate_up, delta=delta)
    if gate_up.numel() == 0:
        return
    width = gate_up.shape[-1] // 2
    block = min(next_power_of_2(width), 1024)
    grid = (gate_up.numel() // (2 * width), cdiv(width, block))
    _silu_mul_kernel[grid](
        gate_up, delta, out[0], HAS_DELTA=delta is not None, WIDTH=width, BLOCK=block, num_warps=4, **pdl_options(pdl)
    )


def silu_mul_quant_launch(
    gate_up: torch.Tensor,
    delta: Optional[torch.Tensor],
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    exact: bool = False,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (h, q, scale). Ignores `sm_budget`.

    A row has one scale and is computed by one CTA; few wide rows are computed by two launches that divide each row
    among several CTAs.
    """
    require_contiguous("silu_mul_quant", gate_up=gate_up, delta=delta)
    if gate_up.numel() == 0:
        return
    h, q, scale = out
    width = gate_up.shape[-1] // 2
    rotated = rotated_width(width, rotate)
    rows = gate_up.numel() // (2 * width)
    block, warps = row_block(width)
    quarters = rotated == 128 and width <= block
    if rows <= SHARED_ROWS and width >= SHARED_WIDTH and not exact:  # the two launches round in another order
        chunks = cdiv(width, CHUNK)
        whole = (
            h
            if keep
            else workspace(gate_up.device, "silu_mul_quant.h", rows * width * gate_up.element_size()).view(
                gate_up.dtype
            )
        )
        largest = workspace(gate_up.device, "silu_mul_quant.largest", rows * chunks * 4).view(torch.float32)
        form = {"ROTATE": rotated, "WIDTH": width, "CHUNK": CHUNK, "num_warps": 4, **pdl_options(pdl)}
        _silu_mul_chunk_kernel[(rows, chunks)](
            gate_up, delta, whole, largest, chunks, HAS_DELTA=delta is not None, **form
        )
        _quantize_chunk_kernel[(rows, chunks)](whole, largest, q, scale, chunks, CHUNKS=next_power_of_2(chunks), **form)
        return
    # an SM has at most one row, and its latency matters, or it has two wide rows, which fit only with these limits
    if not quarters and (rows <= H200_SMS or width > 8192):
        warps = min(2 * warps, 32)
    _silu_mul_quant_kernel[(rows,)](
        gate_up, delta, h if keep else None, q, scale, HAS_DELTA=delta is not None, KEEP=keep, ROTATE=rotated,
        WIDTH=width, BLOCK=block, num_warps=warps,
        maxnreg=MOST_REGISTERS if quarters and delta is not None and not keep else None, **pdl_options(pdl),
    )  # fmt: skip


silu_mul = register("silu_mul", silu_mul_reference, silu_mul_fake, silu_mul_launch, kind="silu_mul", family="silu")
silu_mul_quant = register(
    "silu_mul_quant",
    silu_mul_quant_reference,
    silu_mul_quant_fake,
    silu_mul_quant_launch,
    kind="silu_mul",
    family="silu",
)
