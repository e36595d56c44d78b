"""`lora_shrink`, the first half of LoRA: from hidden states to the adapter's ranks, as split-K planes."""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors
from ..core.dtypes import QUANTIZED_MAX
from ..core.registry import register
from ..core.reproducible_sums import product
from ..core.triton_support import INTERP, cdiv, dot_ieee, next_power_of_2, pdl_options, require_contiguous
from ..elementwise.quantize_blocks import BLOCK, dequantize_blocks, padded_scales
from .plan import pairs_of_groups

EIGHT_BIT = tuple(QUANTIZED_MAX)  # quantized dtypes
CTAS_PER_SM = 16  # maximum programs per SM
MAX_ONCE = 512  # maximum input features in a program's registers


def split_width(k: int, splits: int) -> int:
    """Return the input features of one split-K plane (a multiple of 128; the last planes may have fewer, or none)."""
    return cdiv(cdiv(k, splits), 128) * 128


def dequantized(values: torch.Tensor, scale: Optional[torch.Tensor]) -> torch.Tensor:
    """Return values [..., K] in fp32, times their row's scale [...] if given."""
    return values.float() if scale is None else values.float() * scale.unsqueeze(-1)


def reference(
    x: torch.Tensor,
    a: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    splits: int,
    a_scale: Optional[torch.Tensor] = None,
    x_scale: Optional[torch.Tensor] = None,
    pairs_per_row: int = 1,
) -> torch.Tensor:
    """Return planes[p, t] = x[t, chunk p] @ a[slot of t, :, chunk p]^T in fp32.

    A token's ranks do not depend on the tokens next to it (`core/reproducible_sums.py`).

    x            [T, K] model dtype, or e4m3 or int8 with x_scale fp32: [T], or [K / 128, P] as in `quantize_blocks`
                 (then a has x's dtype)
    a            [S, n*R, K] model dtype, or e4m3 or int8 with a_scale [S, n*R] fp32: A matrices of S adapters, those of
                 n packed linears concatenated; n*R a multiple of 16
    token_order, tiles, tile   from `lora_plan`; a tile of 1 only from `group_plan`
    pairs_per_row  the plan is of pairs of a token and an expert, this many for each row of x: pair t reads row
                 t // pairs_per_row, T counts pairs, and a "slot" is a group (`expert_lora`)
    returns      [splits, T, n*R] fp32; zero for tokens without an adapter. Chunk p is columns p*w .. (p+1)*w with w =
                 split_width(K, splits)
    """
    k, width = x.shape[1], split_width(x.shape[1], splits)
    if x_scale is not None and x_scale.dim() == 2:
        x, x_scale = dequantize_blocks(x, x_scale), None
    planes = fake(x, a, token_order, tiles, tile, splits, a_scale, x_scale, pairs_per_row).zero_()
    for slot, tokens in pairs_of_groups(token_order, tiles):
        for plane in range(splits):
            chunk = slice(min(k, plane * width), min(k, (plane + 1) * width))
            rows, matrix = tokens // pairs_per_row, a[slot, :, chunk]
            result = product(x[rows, chunk], matrix, torch.float32)
            if a_scale is not None:
                result *= a_scale[slot]
            if x_scale is not None:
                result *= x_scale[rows].unsqueeze(-1)
            planes[plane, tokens] = result
    return planes


def fake(
    x: torch.Tensor,
    a: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    splits: int,
    a_scale: Any = None,
    x_scale: Any = None,
    pairs_per_row: int = 1,
) -> torch.Tensor:
    """Return an empty result."""
    return x.new_empty((splits, x.shape[0] * pairs_per_row, a.shape[1]), dtype=torch.float32)


@triton.jit
def wait_then_launch(PDL: tl.constexpr):
    """Wait for the previous kernel, then launch the readers of the planes on either lane; the plan is complete then."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not INTERP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def widened(rows, dtype: tl.constexpr):
    """Convert rows to another type exactly; the interpreter's own cast of int8 to bf16 is wrong."""
    if INTERP:
        rows = rows.to(tl.float32)
    return rows.to(dtype)


@triton.jit
def _product(a_part, x_part, acc):
    """Return acc + a_part @ x_part.

    Quantized rows with 16-bit activations are widened (exactly); two quantized operands are multiplied as they are.
    `acc` is int32 for two int8 operands (an exact sum).
    """
    if x_part.dtype == tl.int8:
        return tl.dot(a_part, x_part, acc, out_dtype=tl.int32)
    else:  # Triton 3.6 compiles code after a return
        return dot_ieee(widened(a_part, x_part.dtype), x_part, acc)


@triton.jit
def _row_of(token, PAIRS_PER_ROW: tl.constexpr):
    """Return the rows of x, and of its scales, that tokens or pairs read."""
    return token if PAIRS_PER_ROW == 1 else token // PAIRS_PER_ROW


@triton.jit
def _store(
    planes, result, a_scale, x_scale, slot, split, token, rank, lane, count, num_tokens, ranks,
    PAIRS_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Store a tile of a plane [RANKS, TILE] fp32 or int32, times its scales; `slot` -1: the result is zero already."""
    result = result.to(tl.float32)
    if a_scale is not None:
        result *= tl.load(
            a_scale + slot.to(tl.int64) * ranks + rank, mask=rank < tl.where(slot >= 0, ranks, 0), other=0.0
        )[:, None]
    if x_scale is not None:
        result *= tl.load(x_scale + _row_of(token, PAIRS_PER_ROW), mask=lane < count, other=0.0)[None, :]
    target = planes + (split * num_tokens + token[None, :]) * ranks + rank[:, None]
    tl.store(target, result, mask=(lane < count)[None, :] & (rank < ranks)[:, None])


@triton.jit
def _shrink_blocks(
    x, a, a_scale, x_scale, slot, token, rank, lane, count, start, k, ranks, width, BLOCKS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Return A rows @ x^T over `width` columns from `start`, fp32 [RANKS, TILE], with x_scale [k / 128, SCALES].

    BLOCKS products run at once, each with its scales. The order of the loads matters: operands are stored to shared
    memory as soon as their load completes, so with Triton 3.6 no load after the PDL wait waits for another load.
    """
    block = tl.arange(0, BLOCKS)
    column = start + block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = start + block * 128 < tl.minimum(k, start + width)
    a_inside = inside[:, None] & (rank < tl.where((slot >= 0) & (count > 0), ranks, 0))[None, :]
    x_inside = inside[:, None] & (lane < count)[None, :]
    a_rows = slot.to(tl.int64) * ranks + rank
    by_block = tl.load(x_scale + (start // 128 + block)[:, None] * SCALES + token[None, :], mask=x_inside, other=0.0)
    by_rank = tl.load(a_scale + a_rows, mask=rank < tl.where(slot >= 0, ranks, 0), other=0.0)
    x_part = tl.load(x + token[None, None, :] * k + column[:, :, None], mask=x_inside[:, None, :], other=0.0)
    a_part = tl.load(a + a_rows[None, :, None] * k + column[:, None, :], mask=a_inside[:, :, None], other=0.0)
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    products = _product(a_part, x_part, tl.zeros([BLOCKS, rank.shape[0], lane.shape[0]], SUM)).to(tl.float32)
    return tl.sum(products * by_block[:, None, :], axis=0) * by_rank[:, None]


@triton.jit
def shrink_once_kernel(
    x, a, a_scale, x_scale, token_order, tiles, planes, num_tokens, k, ranks, width, rank_blocks, splits,
    TILE: tl.constexpr, RANKS: tl.constexpr, BLOCK_K: tl.constexpr, ORDER: tl.constexpr, EVEN: tl.constexpr,
    SCALES: tl.constexpr, PDL: tl.constexpr, PAIRS_PER_ROW: tl.constexpr = 1,
):  # fmt: skip
    """Compute one work item per program, (tile, split, block of ranks), with all its operands loaded at once.

    planes[split, tokens, ranks] = (A rows @ x^T)^T. Next to a base GEMM that fills the memory queues a load takes
    microseconds, so few loads depend on other loads.
    """
    wait_then_launch(PDL)
    place = tl.arange(0, ORDER)
    # load the whole order: a load of the needed part only would depend on the load of the tile
    order = tl.load(token_order + place, mask=place < num_tokens, other=0)
    row = tiles + tl.program_id(0) // (splits * rank_blocks) * 3
    slot, first, count = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    split = tl.program_id(0) // rank_blocks % splits
    rank = tl.program_id(0) % rank_blocks * RANKS + tl.arange(0, RANKS)
    lane = tl.arange(0, TILE)
    token = tl.gather(order, tl.minimum(first + lane, num_tokens - 1), 0)
    row_of_x = _row_of(token, PAIRS_PER_ROW)
    if SCALES:
        result = _shrink_blocks(
            x, a, a_scale, x_scale, slot, row_of_x, rank, lane, count, split * width, k, ranks, width, BLOCK_K // 128,
            SCALES,
        )  # fmt: skip
        _store(planes, result, None, None, slot, split, token, rank, lane, count, num_tokens, ranks, PAIRS_PER_ROW)
    else:
        column = split * width + tl.arange(0, BLOCK_K)
        a_inside = (rank < tl.where((slot >= 0) & (count > 0), ranks, 0))[:, None]
        x_inside = (lane < count)[None, :]
        if not EVEN:
            stop = tl.minimum(k, split * width + width)
            a_inside = a_inside & (column < stop)[None, :]
            x_inside = x_inside & (column < stop)[:, None]
        a_part = tl.load(
            a + slot.to(tl.int64) * ranks * k + rank[:, None] * k + column[None, :], mask=a_inside, other=0.0
        )
        x_part = tl.load(x + row_of_x[None, :] * k + column[:, None], mask=x_inside, other=0.0)
        SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
        result = _product(a_part, x_part, tl.zeros([RANKS, TILE], SUM))
        _store(
            planes, result, a_scale, x_scale, slot, split, token, rank, lane, count, num_tokens, ranks, PAIRS_PER_ROW
        )


@triton.jit
def _block_scale(x_scale, start, stop, token, lane, count, SCALES: tl.constexpr):
    """Return the tokens' scales [TILE] of the block of column `start`."""
    return tl.load(x_scale + start // 128 * SCALES + token, mask=lane < tl.where(start < stop, count, 0), other=0.0)


@triton.jit
def shrink_kernel(
    x, a, a_scale, x_scale, token_order, tiles, planes, num_tokens, k, ranks, width, num_tiles, rank_blocks, splits,
    TILE: tl.constexpr, RANKS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    SCALES: tl.constexpr, PDL: tl.constexpr, PAIRS_PER_ROW: tl.constexpr = 1,
):  # fmt: skip
    """Compute the work items of `shrink_once_kernel` in loops, for any number of programs and columns.

    Loads are pipelined through shared memory; those of block scales explicitly.
    """
    PRODUCT: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    SUM: tl.constexpr = tl.float32 if SCALES else PRODUCT
    wait_then_launch(PDL)
    per_tile = splits * rank_blocks
    work = num_tiles * per_tile
    item = tl.program_id(0)
    while item < work:
        tile_row = tiles + item // per_tile * 3
        slot, first, count = tl.load(tile_row), tl.load(tile_row + 1), tl.load(tile_row + 2)
        if count == 0:
            item = work  # unused tiles are at the end
        else:
            split = item % per_tile // rank_blocks
            rank = item % rank_blocks * RANKS + tl.arange(0, RANKS)
            lane = tl.arange(0, TILE)
            token = tl.load(token_order + first + lane, mask=lane < count, other=0)
            acc = tl.zeros([RANKS, TILE], SUM)
            if slot >= 0:
                a_rows = a + slot.to(tl.int64) * ranks * k + rank[:, None] * k
                row_of_x = _row_of(token, PAIRS_PER_ROW)
                x_rows = x + row_of_x[None, :] * k
                stop = tl.minimum(k, split * width + width)
                if SCALES:
                    step_scale = _block_scale(x_scale, split * width, stop, row_of_x, lane, count, SCALES)
                for start in tl.range(split * width, stop, BLOCK_K, num_stages=STAGES):
                    column = start + tl.arange(0, BLOCK_K)
                    if EVEN:
                        a_part = tl.load(a_rows + column[None, :])
                        x_part = tl.load(x_rows + column[:, None], mask=(lane < count)[None, :], other=0.0)
                    else:
                        a_part = tl.load(
                            a_rows + column[None, :], mask=(rank < ranks)[:, None] & (column < k)[None, :], other=0.0
                        )
                        x_part = tl.load(
                            x_rows + column[:, None], mask=(lane < count)[None, :] & (column < k)[:, None], other=0.0
                        )
                    if SCALES:
                        acc += (
                            _product(a_part, x_part, tl.zeros([RANKS, TILE], PRODUCT)).to(tl.float32)
                            * step_scale[None, :]
                        )
                        # one step ahead only: loads further ahead would disable the pipeline
                        step_scale = _block_scale(x_scale, start + BLOCK_K, stop, row_of_x, lane, count, SCALES)
                    elif x_scale is None or x.dtype.element_ty == tl.int8:
                        acc = _product(a_part, x_part, acc)
                    else:  # FP8 tensor cores keep 14 bits of a running sum: sum across steps in fp32
                        acc += _product(a_part, x_part, tl.zeros([RANKS, TILE], tl.float32))
            _store(
                planes, acc, a_scale, None if SCALES else x_scale, slot, split, token, rank, lane, count, num_tokens,
                ranks, PAIRS_PER_ROW,
            )  # fmt: skip
            item += tl.num_programs(0)


def once_block(ranks: int, width: int) -> tuple[int, int, int]:
    """Return (ranks, input features, warps) of a program of `shrink_once_kernel`, for planes of `width` features."""
    block_k = next_power_of_2(width)
    return 32 if ranks % 32 == 0 else 16, block_k, 8 if block_k >= 512 else 4


def loop_block(ranks: int, tile: int, itemsize: int) -> tuple[int, int]:
    """Return (ranks, input features) of a step of `shrink_kernel`.

    x is read once per block of ranks, so blocks are large for many tokens. The number of features divides 128, so that
    a step has one block of scales.
    """
    if itemsize == 4:
        return 16, 32
    if tile < 64:
        return 32 if ranks % 32 == 0 else 16, 128
    return next_power_of_2(cdiv(ranks, cdiv(ranks, 128))), 128 // itemsize


def launch(
    x: torch.Tensor,
    a: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    splits: int,
    a_scale: Optional[torch.Tensor] = None,
    x_scale: Optional[torch.Tensor] = None,
    pairs_per_row: int = 1,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out`. a has x's dtype, or 8 bits with a 16-bit x.

    Raises ValueError unless tensors are contiguous, a's ranks a multiple of 16, and exactly the 8-bit tensors (e4m3,
    int8) have scales of the right shape.
    """
    tokens, k = x.shape[0] * pairs_per_row, x.shape[1]
    ranks = a.shape[1]
    require_contiguous("lora_shrink", x=x, a=a, a_scale=a_scale, x_scale=x_scale, planes=out[0])
    if ranks % 16 or a.shape[2] != k or (a.dtype != x.dtype and (a.dtype not in EIGHT_BIT or x.dtype in EIGHT_BIT)):
        raise ValueError(
            f"lora_shrink: a is {a.dtype}{tuple(a.shape)} for x {x.dtype}{tuple(x.shape)}; "
            f"needs [slots, ranks (a multiple of 16), {k}] in x's dtype, or with a 16-bit x in {EIGHT_BIT[0]} or "
            f"{EIGHT_BIT[1]}"
        )
    for name, values, scale in (("a", a, a_scale), ("x", x, x_scale)):
        by_block = name == "x" and scale is not None and scale.dim() == 2
        if (values.dtype in EIGHT_BIT) != (scale is not None) or (
            scale is not None and not by_block and scale.shape != values.shape[:-1]
        ):
            raise ValueError(
                f"lora_shrink: {name} is {values.dtype}{tuple(values.shape)} with scales "
                f"{None if scale is None else tuple(scale.shape)}; "
                f"{EIGHT_BIT[0]} and {EIGHT_BIT[1]} need one scale per row, other dtypes none"
            )
    scales = 0  # columns of x_scale if it has block scales, else 0
    if x_scale is not None and x_scale.dim() == 2:
        scales = padded_scales(x.shape[0])
        if k % BLOCK or x_scale.shape != (k // BLOCK, scales):
            raise ValueError(
                f"lora_shrink: x {tuple(x.shape)} has scales {tuple(x_scale.shape)}; for scales per block K must be a "
                f"multiple of {BLOCK}, "
                f"and the scales [K / {BLOCK}, {scales}] as from quantize_blocks for {x.shape[0]} tokens"
            )
    if tokens == 0:
        return
    height = max(16, tile)  # rows of a product
    width = split_width(k, splits)
    programs = CTAS_PER_SM * (multiprocessors(x.device) if sm_budget is None else sm_budget)
    tensors = (x, a, a_scale, x_scale, token_order, tiles, out[0])
    if tile < 64 and tokens <= 1024 and width <= MAX_ONCE and x.element_size() <= 2:
        rank_block, block_k, warps = once_block(ranks, width)
        rank_blocks = cdiv(ranks, rank_block)
        work = tiles.shape[0] * splits * rank_blocks
        if work <= programs:
            shrink_once_kernel[(work,)](
                *tensors, tokens, k, ranks, width, rank_blocks, splits, TILE=height, RANKS=rank_block, BLOCK_K=block_k,
                ORDER=max(32, next_power_of_2(tokens)), EVEN=k == splits * width and width == block_k, SCALES=scales,
                PAIRS_PER_ROW=pairs_per_row, num_warps=warps, **pdl_options(pdl),
            )  # fmt: skip
            return
    rank_block, block_k = loop_block(ranks, tile, x.element_size())
    rank_blocks = cdiv(ranks, rank_block)
    shrink_kernel[(min(programs, tiles.shape[0] * splits * rank_blocks),)](
        *tensors, tokens, k, ranks, width, tiles.shape[0], rank_blocks, splits, TILE=height, RANKS=rank_block,
        BLOCK_K=block_k, STAGES=4, EVEN=k % block_k == 0 and ranks % rank_block == 0, SCALES=scales,
        PAIRS_PER_ROW=pairs_per_row, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


lora_shrink = register("lora_shrink", reference, fake, launch, kind="lora_shrink", family="lora")
