"""`lora_expand`, the second half of LoRA: from the ranks of `lora_shrink` to the linear's output width."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors
from ..core.registry import register
from ..core.reproducible_sums import product
from ..core.triton_support import cdiv, dot_ieee, next_power_of_2, pdl_options, pdl_start, require_contiguous
from .plan import pairs_of_groups
from .shrink import EIGHT_BIT, dequantized, widened

# programs per SM of a limited launch: next to a base GEMM an expand is bound by the number of loads in flight
CTAS_PER_SM = 8
MAX_RANK = 256
MAX_ONE_BLOCK, BLOCK_OF_MORE = 128, 64
"""Up to the first number of ranks, a program loads all at once; with more, it adds the products of smaller blocks."""


def delta_dtype(b: torch.Tensor) -> torch.dtype:
    """Return the dtype of a delta: b's own, bf16 for a quantized b."""
    return torch.bfloat16 if b.dtype in EIGHT_BIT else b.dtype


def reference(
    planes: torch.Tensor,
    b: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    slices: Sequence[int],
    b_scale: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return delta[t, slice i] = (sum of planes[:, t, i*R:(i+1)*R] in delta's dtype) @ b[slot of t, slice i]^T.

    A token's delta does not depend on the tokens next to it (`core/reproducible_sums.py`).

    planes       [splits, T, n*R] fp32, added in order
    b            [S, N, R] model dtype, or e4m3 or int8 with b_scale [S, N] fp32; includes alpha / rank
    token_order, tiles, tile   from `lora_plan`, or of pairs (`expert_lora`): then T counts pairs, S groups
    slices       the n output widths of the packed linears, adding up to N
    returns      [T, N] in b's dtype (bf16 for an 8-bit b); zeros for tokens without an adapter
    """
    ranks = b.shape[2]
    delta = fake(planes, b, token_order, tiles, tile, slices).zero_()
    shrunk = planes[0]
    for plane in planes[1:]:
        shrunk = shrunk + plane
    shrunk = shrunk.to(delta.dtype).float()
    for slot, tokens in pairs_of_groups(token_order, tiles):
        rows = dequantized(b[slot], None if b_scale is None else b_scale[slot])
        start = 0
        for i, width in enumerate(slices):
            own = shrunk[tokens, i * ranks : (i + 1) * ranks]
            delta[tokens, start : start + width] = product(own, rows[start : start + width], delta.dtype)
            start += width
    return delta


def fake(planes: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result."""
    return b.new_empty((planes.shape[1], b.shape[1]), dtype=delta_dtype(b))


@triton.jit
def place_of(item, blocks_per_tile, WIDTH0, WIDTH1, WIDTH2, COLUMNS: tl.constexpr):
    """Return (tile, slice, first column, end of the slice) of a work item.

    Blocks of COLUMNS columns are counted slice by slice, so that no block spans two slices.
    """
    block = item % blocks_per_tile
    blocks0 = tl.cdiv(WIDTH0, COLUMNS)
    blocks1 = tl.cdiv(WIDTH1, COLUMNS)
    part = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, WIDTH0, WIDTH0 + WIDTH1))
    width = tl.where(part == 0, WIDTH0, tl.where(part == 1, WIDTH1, WIDTH2))
    block -= tl.where(part == 0, 0, tl.where(part == 1, blocks0, blocks0 + blocks1))
    return item // blocks_per_tile, part, begin + block * COLUMNS, begin + width


@triton.jit
def _load_b(
    b, b_scale, tiles, item, end, blocks_per_tile, n, ranks, WIDTH0, WIDTH1, WIDTH2, COLUMNS: tl.constexpr,
    RANKS: tl.constexpr, FIRST=0,
):  # fmt: skip
    """Load RANKS ranks from FIRST on of B's rows of a work item, and the rows' scales (or ones).

    Loads zeros past the last row and without an adapter.
    """
    tile, _, begin, stop = place_of(item, blocks_per_tile, WIDTH0, WIDTH1, WIDTH2, COLUMNS)
    slot = tl.load(tiles + tile * 3, mask=item < end, other=-1)
    stop = tl.where(slot >= 0, stop, 0)
    column = begin + tl.arange(0, COLUMNS)
    rank = FIRST + tl.arange(0, RANKS)
    rows = b + slot.to(tl.int64) * n * ranks + column[:, None] * ranks + rank[None, :]
    scale = tl.full([COLUMNS], 1.0, tl.float32)
    if b_scale is not None:
        scale = tl.load(b_scale + slot.to(tl.int64) * n + column, mask=column < stop, other=0.0)
    return tl.load(rows, mask=(column < stop)[:, None] & (rank < ranks)[None, :], other=0.0), scale


@triton.jit
def _load_tokens(token_order, tiles, tile, wanted, TILE: tl.constexpr):
    """Return a tile's tokens [TILE], their number, and the number of those with a delta."""
    row = tiles + tile * 3
    slot, first = tl.load(row, mask=wanted, other=-1), tl.load(row + 1, mask=wanted, other=0)
    count = tl.load(row + 2, mask=wanted, other=0)
    lane = tl.arange(0, TILE)
    return tl.load(token_order + first + lane, mask=lane < count, other=0), count, tl.where(slot >= 0, count, 0)


@triton.jit
def sum_planes(
    planes, token, active, part, num_tokens, ranks, all_ranks, SPLITS: tl.constexpr, TILE: tl.constexpr,
    RANKS: tl.constexpr, FIRST=0,
):  # fmt: skip
    """Add the planes of one tile and slice in order, RANKS ranks from FIRST on: [RANKS, TILE] fp32."""
    rank = FIRST + tl.arange(0, RANKS)
    source = planes + token[None, :] * all_ranks + part * ranks + rank[:, None]
    wanted = (tl.arange(0, TILE) < active)[None, :] & (rank < ranks)[:, None]
    total = tl.zeros([RANKS, TILE], tl.float32)
    for plane in tl.static_range(SPLITS):
        total += tl.load(source + plane * num_tokens * all_ranks, mask=wanted, other=0.0)
    return total


@triton.jit
def expand_operand(shrunk, delta_type: tl.constexpr, stored: tl.constexpr):
    """Convert the summed planes to the product's operand: rounded to the delta's dtype, or fp16 for e4m3 rows.

    e4m3 rows convert to fp16 in one instruction. int8 rows are widened to the delta's dtype exactly, to bf16 by a byte
    permutation.
    """
    shrunk = shrunk.to(delta_type)
    if stored == tl.float8e4nv:
        shrunk = tl.minimum(tl.maximum(shrunk.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return shrunk


@triton.jit
def expand_once_kernel(
    planes, b, b_scale, token_order, tiles, delta, num_tokens, n, ranks, all_ranks, blocks_per_tile, WIDTH0, WIDTH1,
    WIDTH2, SPLITS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
    BLOCKS: tl.constexpr = 1,
):  # fmt: skip
    """Compute one work item per program: (tile, block of COLUMNS columns of one slice); unused tiles return at once.

    BLOCKS products of RANKS ranks are added in order.

    A program needs half the registers of a looping one. So more programs fit next to a base GEMM and hide latency.
    """
    tile, part, begin, stop = place_of(tl.program_id(0), blocks_per_tile, WIDTH0, WIDTH1, WIDTH2, COLUMNS)
    slot, first, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if count > 0:
        lane = tl.arange(0, TILE)
        token = tl.load(token_order + first + lane, mask=lane < count, other=0)
        column = begin + tl.arange(0, COLUMNS)
        rank = tl.arange(0, RANKS)
        wanted = column < tl.where(slot >= 0, stop, 0)
        at = slot.to(tl.int64) * n + column
        b_rows = tl.load(
            b + at[:, None] * ranks + rank[None, :], mask=wanted[:, None] & (rank < ranks)[None, :], other=0.0
        )
        if b_scale is not None:
            scale = tl.load(b_scale + at, mask=wanted, other=0.0)
        pdl_start(PDL)
        shrunk = sum_planes(
            planes, token, tl.where(slot >= 0, count, 0), part, num_tokens, ranks, all_ranks, SPLITS, TILE, RANKS
        )
        shrunk = expand_operand(shrunk, delta.dtype.element_ty, b.dtype.element_ty)
        result = dot_ieee(widened(b_rows, shrunk.dtype), shrunk, tl.zeros([COLUMNS, TILE], tl.float32))
        if BLOCKS > 1:
            # a bound that is unknown at compile time: with the loop unrolled, the blocks would share the registers;
            # one stage: pipelined, the planes of a long reduction would not fit into shared memory
            for block in tl.range(1, tl.cdiv(ranks, RANKS), num_stages=1):
                more = block * RANKS + rank
                b_rows = tl.load(
                    b + at[:, None] * ranks + more[None, :], mask=wanted[:, None] & (more < ranks)[None, :], other=0.0
                )
                shrunk = sum_planes(
                    planes, token, tl.where(slot >= 0, count, 0), part, num_tokens, ranks, all_ranks, SPLITS, TILE,
                    RANKS, block * RANKS,
                )  # fmt: skip
                shrunk = expand_operand(shrunk, delta.dtype.element_ty, b.dtype.element_ty)
                result = dot_ieee(widened(b_rows, shrunk.dtype), shrunk, result)
        if b_scale is not None:
            result *= scale[:, None]
        target = delta + token[None, :].to(tl.int64) * n + column[:, None]
        tl.store(target, result.to(delta.dtype.element_ty), mask=(lane < count)[None, :] & (column < stop)[:, None])


@triton.jit
def expand_kernel(
    planes, b, b_scale, token_order, tiles, delta, num_tokens, n, ranks, all_ranks, num_tiles, blocks_per_tile, WIDTH0,
    WIDTH1, WIDTH2, SPLITS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
    RANKS: tl.constexpr, PDL: tl.constexpr, BLOCKS: tl.constexpr = 1,
):  # fmt: skip
    """Compute consecutive work items per program, for a limited number of SMs and for 16-bit rows.

    An item is (tile, block of COLUMNS columns of one slice): delta[tokens, columns] = (B rows @ shrunk^T)^T. Programs
    have even shares of the items that the plan uses. A program sums the planes once per tile and slice, and loads B's
    rows of the next item during each product. Of more than RANKS ranks, only the first block is loaded ahead.
    """
    used = tl.zeros([TILES], tl.int32)
    for start in range(0, num_tiles, TILES):
        row = start + tl.arange(0, TILES)
        used += (tl.load(tiles + row * 3 + 2, mask=row < num_tiles, other=0) > 0).to(tl.int32)
    work = tl.sum(used, axis=0) * blocks_per_tile
    share = tl.cdiv(work, tl.num_programs(0))
    item = tl.program_id(0) * share
    end = tl.minimum(item + share, work)
    # load before the wait: the previous kernel does not write the plan or B
    b_rows, scale = _load_b(
        b, b_scale, tiles, item, end, blocks_per_tile, n, ranks, WIDTH0, WIDTH1, WIDTH2, COLUMNS, RANKS,
    )  # fmt: skip
    tile, part, _, _ = place_of(item, blocks_per_tile, WIDTH0, WIDTH1, WIDTH2, COLUMNS)
    token, count, active = _load_tokens(token_order, tiles, tile, item < end, TILE)
    pdl_start(PDL)
    if item < end:
        shrunk = sum_planes(planes, token, active, part, num_tokens, ranks, all_ranks, SPLITS, TILE, RANKS)
        shrunk = expand_operand(shrunk, delta.dtype.element_ty, b.dtype.element_ty)
        while item < end:
            next_rows, next_scale = _load_b(
                b, b_scale, tiles, item + 1, end, blocks_per_tile, n, ranks, WIDTH0, WIDTH1, WIDTH2, COLUMNS, RANKS,
            )  # fmt: skip
            now_tile, now_part, begin, stop = place_of(item, blocks_per_tile, WIDTH0, WIDTH1, WIDTH2, COLUMNS)
            if (now_tile != tile) | (now_part != part):
                tile, part = now_tile, now_part
                token, count, active = _load_tokens(token_order, tiles, tile, True, TILE)
                shrunk = sum_planes(planes, token, active, part, num_tokens, ranks, all_ranks, SPLITS, TILE, RANKS)
                shrunk = expand_operand(shrunk, delta.dtype.element_ty, b.dtype.element_ty)
            result = dot_ieee(widened(b_rows, shrunk.dtype), shrunk, tl.zeros([COLUMNS, TILE], tl.float32))
            if BLOCKS > 1:
                for block in tl.range(1, tl.cdiv(ranks, RANKS), num_stages=1):
                    more_rows, scale = _load_b(
                        b, b_scale, tiles, item, end, blocks_per_tile, n, ranks, WIDTH0, WIDTH1, WIDTH2, COLUMNS, RANKS,
                        block * RANKS,
                    )  # fmt: skip
                    more = sum_planes(
                        planes, token, active, part, num_tokens, ranks, all_ranks, SPLITS, TILE, RANKS, block * RANKS
                    )
                    more = expand_operand(more, delta.dtype.element_ty, b.dtype.element_ty)
                    result = dot_ieee(widened(more_rows, more.dtype), more, result)
            result *= scale[:, None]
            column = begin + tl.arange(0, COLUMNS)
            lane = tl.arange(0, TILE)
            target = delta + token[None, :].to(tl.int64) * n + column[:, None]
            tl.store(target, result.to(delta.dtype.element_ty), mask=(lane < count)[None, :] & (column < stop)[:, None])
            b_rows, scale = next_rows, next_scale
            item += 1


def expand_block(ranks: int, tile: int, widest: int, itemsize: int) -> tuple[int, int]:
    """Return (output columns of a work item, warps), with the most columns for which registers fit two blocks of B."""
    limit = 32 if itemsize == 4 else 128 if tile in (16, 64) else 256
    block = rank_block(ranks) if itemsize == 1 else next_power_of_2(ranks)  # 16-bit rows are loaded one item ahead
    most = (8192 if tile == 32 else 4096) // block
    return max(16, min(limit, most, next_power_of_2(widest))), 4


def rank_block(ranks: int) -> int:
    """Return the ranks of a product: a power of two."""
    return next_power_of_2(ranks) if ranks <= MAX_ONE_BLOCK else BLOCK_OF_MORE


def launch(
    planes: torch.Tensor,
    b: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    slices: Sequence[int],
    b_scale: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out`. With `pdl`, the previous launch in the stream must write neither the plan nor b.

    Raises ValueError unless 1 to 3 slices add up to b's width, and planes hold R ranks for each, at most MAX_RANK.
    """
    splits, tokens, all_ranks = planes.shape
    _, n, ranks = b.shape
    require_contiguous("lora_expand", planes=planes, b=b, b_scale=b_scale, delta=out[0])
    if (b.dtype in EIGHT_BIT) != (b_scale is not None) or (b_scale is not None and b_scale.shape != b.shape[:-1]):
        raise ValueError(
            f"lora_expand: b is {b.dtype}{tuple(b.shape)} with scales "
            f"{None if b_scale is None else tuple(b_scale.shape)}; "
            f"{EIGHT_BIT[0]} and {EIGHT_BIT[1]} need one scale per row, other dtypes none"
        )
    if not 1 <= len(slices) <= 3 or sum(slices) != n or all_ranks != len(slices) * ranks:
        raise ValueError(
            f"lora_expand: slices {list(slices)} and planes {tuple(planes.shape)} do not match b {tuple(b.shape)}: "
            "needs 1 to 3 slices that add up "
            f"to {n}, and {ranks} ranks for each"
        )
    if ranks > MAX_RANK:
        raise ValueError(f"lora_expand: b {tuple(b.shape)} has {ranks} ranks; at most {MAX_RANK} are supported")
    if tokens == 0:
        return
    height = max(8, tile)  # rows of a product
    columns, warps = expand_block(ranks, tile, max(slices), b.element_size())
    blocks_per_tile = sum(cdiv(width, columns) for width in slices)
    widths = [*slices, 0, 0][:3]
    block = rank_block(ranks)
    if sm_budget is None and b_scale is not None:
        expand_once_kernel[tiles.shape[0] * blocks_per_tile,](
            planes, b, b_scale, token_order, tiles, out[0], tokens, n, ranks, all_ranks, blocks_per_tile, *widths,
            SPLITS=splits, TILE=height, COLUMNS=columns, RANKS=block, BLOCKS=cdiv(ranks, block), num_warps=warps,
            **pdl_options(pdl),
        )  # fmt: skip
        return
    programs = CTAS_PER_SM * (multiprocessors(b.device) if sm_budget is None else sm_budget)
    expand_kernel[min(programs, tiles.shape[0] * blocks_per_tile),](
        planes, b, b_scale, token_order, tiles, out[0], tokens, n, ranks, all_ranks, tiles.shape[0], blocks_per_tile,
        *widths, SPLITS=splits, TILE=height, TILES=min(256, next_power_of_2(tiles.shape[0])), COLUMNS=columns,
        RANKS=block, BLOCKS=cdiv(ranks, block), num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip


lora_expand = register("lora_expand", reference, fake, launch, kind="lora_expand", family="lora")
