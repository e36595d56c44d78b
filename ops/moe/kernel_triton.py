"""Linear of pairs sorted by group, in Triton: weights are the M operand of the tensor cores, pairs the N operand.

An item of work is a tile of the plan and BLOCK_N weight rows of its group. The grid depends only on the number of tiles
that the plan may have. Programs take items in turn, skip tiles of group -1 and stop at the first unused tile, so no
count is read by the host and the work of any two programs differs by at most one item. No two programs share an item:
there are no partial sums to exchange, and decode steps have enough items without.

A tile's rows are gathered by pair // PAIRS_PER_ROW, and results are stored by pair.
"""

from itertools import product
from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors
from ..core.triton_support import cdiv, dot_f32, dot_ieee, pdl_options, round_to
from ..elementwise.silu_mul import silu
from ..linear.kernel_selection import LinearConfig, padded_tokens, table_op, tuned_table
from ..linear.kernel_triton import _dot_i32

TILES = (16, 32, 64, 128)  # heights that the kernel supports
LARGE = 64  # tiles from this height on are bound by arithmetic
MEMORY = 224 * 1024  # bytes of shared memory of an SM for the rings of its programs
ROUND = 8  # large tiles whose programs run at the same time: those of one expert read its weights from L2


@triton.jit
def _weight_rows(block, n, BLOCK_N: tl.constexpr, ACTIVATE: tl.constexpr):
    """Return the weight rows [BLOCK_N] of a block, at most n - 1.

    With ACTIVATE every 16 rows are 8 of the gate, then the same 8 of up: a thread of the tensor cores has both.
    """
    row = tl.arange(0, BLOCK_N)
    if ACTIVATE:
        half = n // 2
        column = block * (BLOCK_N // 2) + row // 16 * 8 + row % 8
        return tl.minimum(column, half - 1) + row // 8 % 2 * half
    return tl.minimum(block * BLOCK_N + row, n - 1)


@triton.jit
def _gate_and_up(total, BLOCK_N: tl.constexpr, TILE: tl.constexpr):
    """Return the gate and up rows [BLOCK_N / 2, TILE] of rows in the order of `_weight_rows`."""
    pairs = tl.permute(tl.reshape(total, (BLOCK_N // 16, 2, 8, TILE)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    return tl.reshape(gate, (BLOCK_N // 2, TILE)), tl.reshape(up, (BLOCK_N // 2, TILE))


@triton.jit
def _scaled(total, token_scale, weight_scale_ptr, column, width):
    """Return sums [rows, TILE] in fp32, times the scales of pairs and of weight rows."""
    row_scale = tl.load(weight_scale_ptr + column, mask=column < width, other=0.0)
    return total.to(tl.float32) * token_scale[None, :] * row_scale[:, None]


@triton.jit
def _finish(
    total, scale_ptr, weight_scale_ptr, delta_ptr, out_ptr, pair, inside, start, width, PAIRS_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr, ACTIVATE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store the columns from `start` on of sums [ROWS, TILE], with scales, delta or SiLU; `inside` masks the pairs.

    PARTS parts of the rows are stored one after another, for fewer registers.
    """
    COLUMNS: tl.constexpr = ROWS // 2 if ACTIVATE else ROWS
    if PARTS > 1:
        halves = tl.permute(tl.reshape(total, (2, ROWS // 2, pair.shape[0])), (1, 2, 0))
        first, second = tl.split(halves)
        _finish(
            first, scale_ptr, weight_scale_ptr, delta_ptr, out_ptr, pair, inside, start, width, PAIRS_PER_ROW,
            ROWS // 2, ACTIVATE, PARTS // 2,
        )  # fmt: skip
        _finish(
            second, scale_ptr, weight_scale_ptr, delta_ptr, out_ptr, pair, inside, start + COLUMNS // 2, width,
            PAIRS_PER_ROW, ROWS // 2, ACTIVATE, PARTS // 2,
        )  # fmt: skip
    else:
        column = start + tl.arange(0, COLUMNS)
        if scale_ptr is None:
            value = total
        else:
            token_scale = tl.load(scale_ptr + pair // PAIRS_PER_ROW, mask=inside, other=0.0)
            if ACTIVATE:
                gate, up = _gate_and_up(total, ROWS, pair.shape[0])
                gate = _scaled(gate, token_scale, weight_scale_ptr, column, width)
                value = silu(gate) * _scaled(up, token_scale, weight_scale_ptr + width, column, width)
            else:
                value = _scaled(total, token_scale, weight_scale_ptr, column, width)
        wanted = (column < width)[:, None] & inside[None, :]
        offsets = pair.to(tl.int64)[None, :] * width + column[:, None]
        if delta_ptr is not None:
            value += tl.load(delta_ptr + offsets, mask=wanted, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, round_to(value, out_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_tiles"])  # one compilation for every token count of a tile height
def _grouped_linear(
    x_ptr, scale_ptr, weight_ptr, weight_scale_ptr, delta_ptr, out_ptr, order_ptr, tiles_ptr, num_tiles, n, k, width,
    PAIRS_PER_ROW: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ROUND: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATE: tl.constexpr, PAIRS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Run one program of the launch; scale_ptr None: 16-bit operands or fp32."""
    if PDL:
        # the plan and the activations; the next kernel may read the plan before its own wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    INT8: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    SHAPE: tl.constexpr = [TILE, BLOCK_N] if PAIRS_FIRST else [BLOCK_N, TILE]
    nothing = tl.zeros(SHAPE, dtype=tl.int32 if INT8 else tl.float32)
    lane = tl.arange(0, TILE)
    offsets_k = tl.arange(0, BLOCK_K)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if ACTIVATE else BLOCK_N
    blocks = tl.cdiv(n, BLOCK_N)
    item = tl.program_id(0)
    while item < num_tiles * blocks:
        # the tiles of a round take turns for each block
        first_tile = item // (ROUND * blocks) * ROUND
        height = tl.minimum(ROUND, num_tiles - first_tile)
        tile = first_tile + (item - first_tile * blocks) % height
        block = (item - first_tile * blocks) // height
        entry = tiles_ptr + tile * 3
        group, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        item += tl.num_programs(0)
        if (group >= 0) & (count > 0):
            inside = lane < count
            pair = tl.load(order_ptr + first + lane, mask=inside, other=0)
            rows = _weight_rows(block, n, BLOCK_N, ACTIVATE)
            weight_rows = weight_ptr + group.to(tl.int64) * n * k + rows[:, None] * k
            x_columns = x_ptr + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * k
            total = nothing
            for step in tl.range(0, tl.cdiv(k, BLOCK_K), num_stages=STAGES):
                position = step * BLOCK_K + offsets_k
                if EVEN_K:
                    w = tl.load(weight_rows + position[None, :])
                    x = tl.load(x_columns + position[:, None], mask=inside[None, :], other=0.0)
                else:
                    w = tl.load(weight_rows + position[None, :], mask=(position < k)[None, :], other=0.0)
                    x = tl.load(
                        x_columns + position[:, None], mask=inside[None, :] & (position < k)[:, None], other=0.0
                    )
                if PAIRS_FIRST:
                    w, x = tl.trans(x), tl.trans(w)
                if INT8:
                    total = _dot_i32(w, x, total)
                elif scale_ptr is None:
                    total = dot_ieee(w, x, total)
                else:
                    # the tensor cores' running sum has 14 bits: add blocks of K in fp32
                    total += dot_f32(w, x, nothing)
            # loaded again, with another cache modifier, so that no copy takes registers during the loop
            pair = tl.load(order_ptr + first + lane, mask=inside, other=0, cache_modifier=".cg")
            own_scales = weight_scale_ptr if scale_ptr is None else weight_scale_ptr + group.to(tl.int64) * n
            _finish(
                tl.trans(total) if PAIRS_FIRST else total, scale_ptr, own_scales, delta_ptr, out_ptr, pair, inside,
                block * COLUMNS, width, PAIRS_PER_ROW, BLOCK_N, ACTIVATE, 4 if PAIRS_FIRST else 1,
            )  # fmt: skip
        elif (count == 0) & (tile == first_tile):
            item = num_tiles * blocks  # unused tiles are last


def grouped_config(
    num_pairs: int, tile: int, n: int, k: int, dtype: torch.dtype, activate: bool = False
) -> LinearConfig:
    """Return the measured configuration of a plan with tiles of `tile` pairs and weights [E, N, K], else a default.

    The table has entries by number of pairs, as those of other linears by tokens.
    """
    op = table_op("grouped_linear_8bit_silu_mul" if activate else "grouped_linear_8bit", dtype == torch.int8)
    tuned = tuned_table(op).get((n, k, padded_tokens(num_pairs))) if dtype.itemsize == 1 else None
    return tuned if tuned is not None and tuned.block_t == tile else default_config(tile, dtype)


def default_config(tile: int, dtype: torch.dtype) -> LinearConfig:
    """Return a configuration for tiles of `tile` pairs and weights of `dtype`.

    Small tiles are bound by the bytes of the weights: three programs an SM, each with two steps in flight. e4m3 needs
    registers for the sum of a step besides the sum of all.
    """
    if dtype.itemsize == 4:
        return LinearConfig("triton", 32, tile, 32, stages=2)
    if tile < LARGE:
        return LinearConfig("triton", 64, tile, 256 // dtype.itemsize, stages=3, ctas_per_sm=3)
    block_k = 128 // dtype.itemsize
    if tile == LARGE:
        return LinearConfig("triton", 128, tile, block_k, stages=4, ctas_per_sm=2)
    if dtype == torch.float8_e4m3fn:
        return LinearConfig("triton", 128, tile, block_k, stages=5, warps=8)
    return LinearConfig("triton", 128, tile, block_k, stages=3, warps=8, ctas_per_sm=2, max_registers=128)


def candidates(tile: int, dtype: torch.dtype) -> list[LinearConfig]:
    """Return configurations to measure for tiles of `tile` pairs and eight-bit weights of `dtype`."""
    found = [default_config(tile, dtype)]
    if tile < LARGE:
        shapes = [(64, 128, 4), (64, 128, 6), (64, 256, 3), (64, 256, 4), (128, 128, 4), (128, 256, 3)]
        for (block_n, block_k, stages), ctas in product(shapes, (1, 2, 3, 4)):
            found.append(LinearConfig("triton", block_n, tile, block_k, stages, ctas_per_sm=ctas))
    else:
        for block_n, stages, warps, ctas in (
            (64, 4, 4, 2), (64, 4, 4, 3), (128, 3, 4, 2), (128, 4, 4, 2), (128, 3, 8, 2), (128, 5, 8, 1),
            (256, 3, 8, 1), (256, 4, 8, 1),
        ):  # fmt: skip
            most = 128 if warps * ctas == 16 else 0
            found.append(LinearConfig("triton", block_n, tile, 128, stages, warps, ctas, max_registers=most))
    fits = [each for each in found if each.ctas_per_sm * each.stages * (each.block_n + tile) * each.block_k <= MEMORY]
    return list(dict.fromkeys(fits))


def launch_grouped(
    x: torch.Tensor,
    scale: Optional[torch.Tensor],
    weight: torch.Tensor,
    weight_scale: Optional[torch.Tensor],
    delta: Optional[torch.Tensor],
    order: torch.Tensor,
    tiles: torch.Tensor,
    pairs_per_row: int,
    out: torch.Tensor,
    config: LinearConfig,
    *,
    activate: bool = False,
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Run the kernel: fill out [P, N], or [P, N / 2] with `activate`, with tiles of config.block_t pairs.

    All tensors are contiguous. Used by the tuner, too.
    """
    _, n, k = weight.shape
    items = tiles.shape[0] * cdiv(n, config.block_n)
    programs = (sm_budget or multiprocessors(x.device)) * config.ctas_per_sm
    _grouped_linear[min(programs, items),](
        x, scale, weight, weight_scale, delta, out, order, tiles, tiles.shape[0], n, k, out.shape[1],
        PAIRS_PER_ROW=pairs_per_row, TILE=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        STAGES=config.stages, ROUND=ROUND if config.block_t >= LARGE else 1, EVEN_K=k % config.block_k == 0,
        ACTIVATE=activate, PAIRS_FIRST=config.block_t >= LARGE,
        num_warps=config.warps, maxnreg=config.max_registers or None, **pdl_options(pdl),
    )  # fmt: skip
