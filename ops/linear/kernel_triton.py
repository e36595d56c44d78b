"""linear_8bit in Triton, e4m3 or int8: weights are the M operand of the tensor cores, tokens the N operand.

Tokens are padded to 16. A unit of work is one weight tile and BLOCK_K columns of K; units are ordered by tile. Program
c of G computes the units [c * U / G, (c + 1) * U / G): every program reads the same number of bytes for any shape and
any number of programs (`sm_budget`). If programs share a tile, the last one to arrive sums it from planes (fp32, or
int32 for int8) in the order of the programs, so results are bitwise repeatable. With SPLIT off, programs compute whole
tiles and exchange nothing.

If activations have a scale per token and 128 columns (`quantize_blocks`), each step's product is scaled and added in
fp32, and planes are fp32.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.device import workspace
from ..core.triton_support import INTERP, INTERPRETED, dot_f32
from .kernel_selection import BLOCK_K, MAX_TILES, LinearConfig, WorkSplit


@triton.jit
def _first_unit(program, programs, tiles, steps, SPLIT: tl.constexpr):
    """Return the first unit of `program`; every tile has `steps` units."""
    if SPLIT:
        return program * (tiles * steps) // programs
    return program * tiles // programs * steps


@triton.jit
def _prefetch_l2(addresses):
    """Prefetch the 128-byte lines at `addresses` to L2 while the previous kernel still runs."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _dot_i32(a, b, acc):
    """Return acc + a @ b of int8 operands in int32.

    Correct in the interpreter too: there fp32 represents up to 1040 products exactly.
    """
    if INTERP:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee").to(tl.int32)
    return tl.dot(a, b, acc, out_dtype=tl.int32)


@triton.jit
def _finish(
    total, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, out_ptr, rows, columns, tokens, n,
    PADDED: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Apply scales and addends to one tile and store it; total [weight rows, tokens]."""
    row_scale = tl.load(weight_scale_ptr + rows, mask=rows < n, other=0.0)
    if PADDED:
        value = total * row_scale[:, None]
    else:
        token_scale = tl.load(scale_ptr + columns, mask=columns < tokens, other=0.0)
        value = total.to(tl.float32) * token_scale[None, :] * row_scale[:, None]
    offsets = columns.to(tl.int64)[None, :] * n + rows[:, None]
    inside = (rows < n)[:, None] & (columns < tokens)[None, :]
    if HAS_DELTA:
        value += tl.load(delta_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])  # one compilation for every token count of a tile
def _linear_8bit(
    q_ptr, scale_ptr, weight_ptr, weight_scale_ptr, delta_ptr, residual_ptr, out_ptr, planes_ptr, counters_ptr, tokens,
    n, k, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, EVEN_K: tl.constexpr, PADDED: tl.constexpr, HAS_DELTA: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run one program of the launch.

    PADDED: allocated scales per step of K, for one scale per token and step; 0: one scale per token.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    steps = tl.cdiv(k, BLOCK_K)
    token_tiles = tl.cdiv(tokens, BLOCK_T)
    tiles = tl.cdiv(n, BLOCK_N) * token_tiles
    begin = _first_unit(program, programs, tiles, steps, SPLIT)
    unit = begin
    end = _first_unit(program + 1, programs, tiles, steps, SPLIT)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        first_rows = tl.minimum(unit // steps // token_tiles * BLOCK_N + tl.arange(0, BLOCK_N), n - 1).to(tl.int64)
        first_columns = tl.minimum(unit % steps * BLOCK_K + tl.arange(0, PREFETCH) * 128, k - 1)
        _prefetch_l2(weight_ptr + first_rows[:, None] * k + first_columns[None, :])
        tl.extra.cuda.gdc_wait()
    INT8: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    nothing = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.int32 if INT8 else tl.float32)
    start = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32) if PADDED else nothing
    offsets_n = tl.arange(0, BLOCK_N)
    offsets_t = tl.arange(0, BLOCK_T)
    offsets_k = tl.arange(0, BLOCK_K)
    while unit < end:
        tile = unit // steps
        first_step = unit - tile * steps
        last_step = tl.minimum(steps, end - tile * steps)
        rows = tile // token_tiles * BLOCK_N + offsets_n
        columns = tile % token_tiles * BLOCK_T + offsets_t
        # rows past the end repeat the last one and are dropped
        weight_rows = weight_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * k
        q_columns = q_ptr + columns.to(tl.int64)[None, :] * k
        total = start
        for step in tl.range(first_step, last_step, num_stages=STAGES):
            position = step * BLOCK_K + offsets_k
            if EVEN_K:
                w = tl.load(weight_rows + position[None, :])
                x = tl.load(q_columns + position[:, None], mask=(columns < tokens)[None, :], other=0.0)
            else:
                w = tl.load(weight_rows + position[None, :], mask=(position < k)[None, :], other=0.0)
                x = tl.load(
                    q_columns + position[:, None], mask=(columns < tokens)[None, :] & (position < k)[:, None], other=0.0
                )
            if PADDED:
                token_scale = tl.load(scale_ptr + step * PADDED + columns, mask=columns < tokens, other=0.0)
                product = _dot_i32(w, x, nothing) if INT8 else dot_f32(w, x, nothing)
                total += product.to(tl.float32) * token_scale[None, :]
            elif INT8:
                total = _dot_i32(w, x, total)
            else:
                # the tensor cores' running sum has 14 bits: add blocks of K in fp32
                total += dot_f32(w, x, nothing)
        complete = last_step - first_step == steps
        if PARTS > 1:  # noqa: SIM102  a constant: if no tile is shared nothing below is compiled
            if not complete:
                # A program has at most two shared tiles: plane 0 for its first tile, plane 1 for its last one.
                size: tl.constexpr = BLOCK_N * BLOCK_T
                inside = (columns < tokens)[None, :]
                planes = planes_ptr + offsets_n[:, None] * BLOCK_T + offsets_t[None, :]
                own = 2 * program + tl.where(begin < tile * steps, 1, 0)
                tl.store(planes + own * size, total, mask=inside)
                tl.debug_barrier()
                # the programs with the tile's first and last unit
                first = ((tile * steps + 1) * programs - 1) // (tiles * steps)
                last = ((tile + 1) * steps * programs - 1) // (tiles * steps)
                complete = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == last - first
                if complete:
                    begins_before = _first_unit(first, programs, tiles, steps, SPLIT) < tile * steps
                    total = tl.load(
                        planes + (2 * first + tl.where(begins_before, 1, 0)) * size,
                        mask=inside,
                        other=0,
                        cache_modifier=".cg",
                    )
                    for part in tl.static_range(1, PARTS):
                        held = (columns < tl.where(first + part <= last, tokens, 0))[None, :]
                        total += tl.load(planes + 2 * (first + part) * size, mask=held, other=0, cache_modifier=".cg")
                    tl.store(counters_ptr + tile, 0)  # reset for the next launch
        if complete:
            _finish(
                total, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, out_ptr, rows, columns, tokens, n, PADDED,
                HAS_DELTA, HAS_RESIDUAL,
            )  # fmt: skip
        unit = tile * steps + last_step


def split_buffers(
    weight: torch.Tensor, config: LinearConfig, split: WorkSplit, block_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the planes and int32 arrival counters of a launch, shared by kernels that run one after another.

    Planes are int32 for int8 without block scales, else fp32.
    """
    device = weight.device
    plane_bytes = 2 * split.programs * config.block_n * config.block_t * 4 if split.parts > 1 else 16
    planes = workspace(device, "linear_8bit.planes", plane_bytes).view(
        torch.int32 if weight.dtype == torch.int8 and not block_scales else torch.float32
    )
    counters = workspace(device, "linear_8bit.counters", MAX_TILES * 4, zero=True).view(torch.int32)
    return planes, counters


def launch_triton(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    out: torch.Tensor,
    config: LinearConfig,
    split: WorkSplit,
    pdl: bool,
) -> None:
    """Run the kernel: fill out [T, N].

    q [T, K], scale [T] or [K / 128, P], weight [N, K], weight_scale [N], delta and residual [T, N] are contiguous, K is
    a multiple of 16. Raises ValueError for block scales if a step of the configuration is not one block.
    """
    (tokens, k), n = q.shape, weight.shape[0]
    padded = scale.shape[1] if scale.dim() == 2 else 0
    if padded and config.block_k != BLOCK_K:
        raise ValueError(
            f"linear_8bit: scales of {BLOCK_K} columns do not support steps of {config.block_k} columns; use a "
            f"configuration with block_k={BLOCK_K}"
        )
    planes, counters = split_buffers(weight, config, split, padded > 0)
    pdl = pdl and not INTERPRETED
    _linear_8bit[split.programs,](
        q, scale, weight, weight_scale, scale if delta is None else delta, scale if residual is None else residual, out,
        planes, counters, tokens, n, k, BLOCK_N=config.block_n, BLOCK_T=config.block_t, BLOCK_K=config.block_k,
        STAGES=config.stages, SPLIT=split.split, PARTS=split.parts, EVEN_K=k % config.block_k == 0, PADDED=padded,
        HAS_DELTA=delta is not None, HAS_RESIDUAL=residual is not None, PREFETCH=4, PDL=pdl, num_warps=config.warps,
        launch_pdl=pdl,
    )  # fmt: skip
