"""LoRA's second half from ranks that are summed and rounded to int8 once, for all ops that multiply them.

`lora_round` sums `lora_shrink`'s planes and rounds the sum, at the same time as the previous projection. Ops that
compute a delta have many programs per token. Rounded ranks have a sixteenth of the planes' bytes, and neither the sum
nor the search for its maximum delays these programs after their wait.

`lora_expand_rounded` multiplies the ranks by B, next to a projection that leaves few registers and little shared memory
to it. `lora_expand` sums fp32 planes and widens B's int8 rows to bf16, which takes more instructions than the rest.
Here one load of a few bytes per token follows the wait, and an integer product needs 40 registers and no shared memory.
`silu_mul_lora` uses the same functions.
"""

from collections.abc import Sequence
from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import (
    INTERP,
    cdiv,
    next_power_of_2,
    pdl_options,
    pdl_start,
    require_contiguous,
    round_to,
    row_scale,
    to_int8,
)
from ..elementwise.quantize import reference as quantize_rowwise_reference
from .expand import place_of
from .shrink import dequantized, wait_then_launch

WARPS = 4  # per program; each warp of an expand has 32 columns
ROWS = 16  # per program of `lora_round`
TOKENS = 16  # per program of `lora_expand_rounded`
MAX_RANK = 64
# bits of 1.5 * 2**23: adding an integer below 2**22 to the bits adds it to the value
MAGIC_BITS = tl.constexpr(0x4B400000)
MAGIC = tl.constexpr(12582912.0)


def lora_round_reference(planes: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q [T, parts * R] int8, step [T, parts] fp32) of planes [splits, T, parts * R] fp32, added in order.

    Each part's R ranks are quantized as in `quantize_rowwise`. The kernel multiplies by 1 / step, so a value on a
    rounding edge may differ from the reference by one step.
    """
    _check_planes(planes, parts)
    total = planes[0]
    for plane in planes[1:]:
        total = total + plane
    q, step = quantize_rowwise_reference(total.unflatten(1, (parts, -1)), torch.int8)
    return q.flatten(1), step


def lora_round_fake(planes: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    _check_planes(planes, parts)
    return planes.new_empty(planes.shape[1:], dtype=torch.int8), planes.new_empty((planes.shape[1], parts))


def _check_planes(planes: torch.Tensor, parts: int) -> None:
    """Raise ValueError unless planes are fp32 with `parts` times as many ranks."""
    if planes.dim() != 3 or planes.dtype != torch.float32 or parts < 1 or planes.shape[2] % parts:
        raise ValueError(
            f"lora_round: planes {planes.dtype}{tuple(planes.shape)} for {parts} linears; needs torch.float32 "
            "[splits, T, n * R] with n linears"
        )


@triton.jit
def lora_round_kernel(
    planes, q, step, rows, SPLITS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Round ROWS rows per program; a row is one token's ranks of one linear."""
    wait_then_launch(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, RANKS)
    at = row[:, None] * RANK + rank[None, :]
    wanted = (row < rows)[:, None] & (rank < RANK)[None, :]
    total = tl.zeros([ROWS, RANKS], tl.float32)
    for plane in tl.static_range(SPLITS):
        total += tl.load(planes + plane * rows * RANK + at, mask=wanted, other=0.0)
    size = row_scale(tl.max(tl.abs(total), axis=1), tl.int8)
    tl.store(q + at, to_int8(total * (1.0 / size)[:, None]), mask=wanted)
    tl.store(step + row, size, mask=row < rows)


def lora_round_launch(
    planes: torch.Tensor,
    parts: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (q, step). Ignores `sm_budget`: the launch is small."""
    _check_planes(planes, parts)
    require_contiguous("lora_round", planes=planes)
    if planes.numel() == 0:
        return
    rows, rank = planes.shape[1] * parts, planes.shape[2] // parts
    lora_round_kernel[(cdiv(rows, ROWS),)](
        planes, *out, rows, SPLITS=planes.shape[0], RANK=rank, RANKS=next_power_of_2(rank), ROWS=ROWS, num_warps=WARPS,
        **pdl_options(pdl),
    )  # fmt: skip


lora_round = register(
    "lora_round", lora_round_reference, lora_round_fake, lora_round_launch, kind="lora_round", family="lora"
)


def fits(rank: int) -> str | None:
    """Return None if the products support stacks of this rank, else the reason."""
    return (
        None
        if 8 <= rank <= MAX_RANK and rank % 8 == 0
        else f"LoRA stacks of rank {rank}; supported are multiples of 8 up to {MAX_RANK}"
    )


# Triton distributes the rows of a matrix that is loaded by 8 or 16 bytes over lanes first, then warps, then registers.
# The rows of the loads below are ordered such that a thread loads exactly its part of the product's operands and
# result, without shared memory. A warp computes its own product of 16 tokens and 32 columns. A thread has pairs of
# columns of blocks of 8, and pairs of four blocks are adjacent in memory; of 32 ranks it has 4 adjacent ones in each
# half.
@triton.jit
def load_b(b, begin, end, slot, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr):
    """Load B's rows of 32 * WARPS columns from `begin` as the product's operand, int8 [WARPS, RANKS, 32].

    Rows from column `end` on are zero, and all rows without an adapter.
    """
    row = tl.arange(0, RANKS * WARPS * 4)[:, None]
    place = row // 4 % 8
    column = begin + row // 32 % WARPS * 32 + place // 2 * 8 + row // (32 * WARPS) % 4 * 2 + place % 2
    rank = row // (128 * WARPS) * 32 + row % 4 * 8 + tl.arange(0, 8)[None, :]
    rows = tl.load(b + column * RANK + rank, mask=(column < tl.where(slot >= 0, end, 0)) & (rank < RANK), other=0)
    rows = tl.permute(tl.reshape(rows, (RANKS // 32, 4, WARPS, 8, 4, 2, 4)), (2, 0, 5, 4, 6, 1, 3))
    return tl.reshape(rows, (WARPS, RANKS, 32))


@triton.jit
def load_scale(b_scale, begin, end, slot, WARPS: tl.constexpr):
    """Load the scales of these columns as [1, WARPS, 8, 32], repeated 8 times; zeros without an adapter."""
    row = tl.arange(0, WARPS * 64)[:, None]
    column = begin + row // 32 % WARPS * 32 + row % 4 * 8 + row // (32 * WARPS) * 4 + tl.arange(0, 4)[None, :]
    scale = tl.load(b_scale + column, mask=column < tl.where(slot >= 0, end, 0), other=0.0)
    return tl.reshape(tl.permute(tl.reshape(scale, (2, WARPS, 8, 4, 4)), (1, 2, 3, 0, 4)), (1, WARPS, 8, 32))


@triton.jit
def load_tokens(token_order, first, count, WARPS: tl.constexpr):
    """Load 16 tokens for their ranks and results: int64 [WARPS * 64, 1], -1 past the last one."""
    row = tl.arange(0, WARPS * 64)[:, None]
    lane = row // (32 * WARPS) * 8 + row // 4 % 8
    return tl.load(token_order + first + lane, mask=lane < count, other=-1).to(tl.int64)


@triton.jit
def columns_of(begin, WARPS: tl.constexpr):
    """Return the 32 * WARPS columns of these tokens' results, [WARPS * 64, 8]."""
    row = tl.arange(0, WARPS * 64)[:, None]
    return begin + row // 32 % WARPS * 32 + row % 4 * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def load_ranks(
    ranks, token, linear, LINEARS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr
):
    """Load one linear's ranks of 16 tokens as the other operand, int8 [WARPS, 16, RANKS] (in every warp)."""
    row = tl.arange(0, RANKS * WARPS * 2)[:, None]
    rank = row // (64 * WARPS) * 32 + row % 4 * 8 + tl.arange(0, 8)[None, :]
    token = tl.reshape(tl.broadcast_to(token[None, :, :], (RANKS // 32, WARPS * 64, 1)), (RANKS * WARPS * 2, 1))
    values = tl.load(
        ranks + token * (LINEARS * RANK) + linear * RANK + rank, mask=(token >= 0) & (rank < RANK), other=0
    )
    values = tl.permute(tl.reshape(values, (RANKS // 32, 2, WARPS, 8, 4, 2, 4)), (2, 1, 3, 0, 5, 4, 6))
    return tl.reshape(values, (WARPS, 16, RANKS))


@triton.jit
def load_step(rank_step, token, slot, linear, LINEARS: tl.constexpr):
    """Load the steps of these ranks, fp32 [WARPS * 64, 1]; zeros without an adapter."""
    step = tl.load(rank_step + token * LINEARS + linear, mask=tl.where(slot >= 0, token, -1) >= 0, other=0.0)
    # 22 bits: its product with MAGIC is exact
    return (step.to(tl.int32, bitcast=True) & -4).to(tl.float32, bitcast=True)


@triton.jit
def product(q, step, rows, WARPS: tl.constexpr):
    """Return q @ rows times the tokens' steps, fp32 [2, WARPS, 8, 32].

    These are the elements of [WARPS * 64, 8] (`load_tokens`, `columns_of`), in the same threads.
    """
    total = tl.dot(q, rows, tl.full([WARPS, 16, 32], MAGIC_BITS, tl.int32), out_dtype=tl.int32)
    total = tl.permute(tl.reshape(total, (WARPS, 2, 8, 4, 4, 2)), (1, 0, 2, 4, 3, 5))
    # conversion by a sum: an integer conversion instruction takes four times as long
    total = tl.reshape(total, (2, WARPS, 8, 32)).to(tl.float32, bitcast=True)
    step = tl.reshape(tl.broadcast_to(step, (WARPS * 64, 8)), (2, WARPS, 8, 32))
    if INTERP:  # multiply-add rounds twice there
        return (total - MAGIC) * step
    else:
        return tl.fma(total, step, step * -MAGIC)


def lora_expand_rounded_reference(
    ranks: torch.Tensor,
    rank_step: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    slices: Sequence[int],
) -> torch.Tensor:
    """Return delta[t, slice i] = ranks[t, i*R:(i+1)*R] @ b[slot, slice i]^T * rank_step[t, i] * b_scale[slot, slice i].

    ranks, rank_step   [T, n*R] int8, [T, n] fp32 of `lora_round`; arbitrary for tokens without an adapter
    b, b_scale         [S, N, R] int8, [S, N] fp32; includes alpha / rank
    token_order, tiles, tile   from `lora_plan`
    slices             the n output widths of the packed linears, adding up to N
    returns            [T, N] bf16, rounded once from fp32; zeros for tokens without an adapter
    """
    _check_ranks(ranks, rank_step, b, b_scale, slices)
    rank = b.shape[2]
    delta = torch.zeros(ranks.shape[0], b.shape[1], dtype=torch.bfloat16, device=b.device)
    for slot, first, count in tiles.tolist():
        if slot < 0:
            continue
        tokens = token_order[first : first + count].long()
        start = 0
        for i, width in enumerate(slices):
            columns = slice(start, start + width)
            total = ranks[tokens, i * rank : (i + 1) * rank].float() @ b[slot, columns].float().T
            delta[tokens, columns] = (dequantized(total, rank_step[tokens, i]) * b_scale[slot, columns]).to(delta.dtype)
            start += width
    return delta


def lora_expand_rounded_fake(
    ranks: torch.Tensor,
    rank_step: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    slices: Sequence[int],
) -> torch.Tensor:
    """Return an empty result."""
    _check_ranks(ranks, rank_step, b, b_scale, slices)
    return b.new_empty((ranks.shape[0], b.shape[1]), dtype=torch.bfloat16)


def _check_ranks(
    ranks: torch.Tensor, rank_step: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, slices: Sequence[int]
) -> None:
    """Raise ValueError unless shapes and dtypes are those of `lora_expand_rounded_reference`."""
    linears = len(slices)
    if (
        b.dtype != torch.int8
        or b.dim() != 3
        or b_scale.shape != b.shape[:2]
        or not 1 <= linears <= 3
        or sum(slices) != b.shape[1]
    ):
        raise ValueError(
            f"lora_expand_rounded: b {b.dtype}{tuple(b.shape)} and b_scale {tuple(b_scale.shape)} for slices of "
            f"{list(slices)}; needs torch.int8 "
            "[S, N, R] and [S, N] for one to three slices that add up to N"
        )
    if (
        ranks.dtype != torch.int8
        or ranks.shape[1:] != (linears * b.shape[2],)
        or rank_step.dtype != torch.float32
        or rank_step.shape[1:] != (linears,)
    ):
        raise ValueError(
            f"lora_expand_rounded: ranks {ranks.dtype}{tuple(ranks.shape)} and rank_step "
            f"{rank_step.dtype}{tuple(rank_step.shape)}; needs "
            f"torch.int8 [T, {linears * b.shape[2]}] and torch.float32 [T, {linears}], as lora_round makes them for "
            f"{linears} linears"
        )


@triton.jit
def expand_rounded_kernel(
    ranks, rank_step, b, b_scale, token_order, tiles, delta, blocks, groups, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr, LINEARS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute 16 tokens of a tile and 32 * WARPS columns of one slice per program; unused programs return at once."""
    N: tl.constexpr = WIDTH0 + WIDTH1 + WIDTH2
    tile, linear, begin, end = place_of(tl.program_id(0) // groups, blocks, WIDTH0, WIDTH1, WIDTH2, 32 * WARPS)
    done = tl.program_id(0) % groups * 16
    row = tiles + tile * 3
    slot, first, count = tl.load(row), tl.load(row + 1) + done, tl.load(row + 2) - done
    if count > 0:
        rows = load_b(b + slot.to(tl.int64) * N * RANK, begin, end, slot, RANK, RANKS, WARPS)
        scale = load_scale(b_scale + slot.to(tl.int64) * N, begin, end, slot, WARPS)
        token, column = load_tokens(token_order, first, count, WARPS), columns_of(begin, WARPS)
        pdl_start(PDL)
        values = (
            product(
                load_ranks(ranks, token, linear, LINEARS, RANK, RANKS, WARPS),
                load_step(rank_step, token, slot, linear, LINEARS),
                rows,
                WARPS,
            )
            * scale
        )
        values = tl.reshape(round_to(values, delta.dtype.element_ty), (WARPS * 64, 8))
        tl.store(delta + token * N + column, values, mask=(token >= 0) & (column < end))


def lora_expand_rounded_launch(
    ranks: torch.Tensor,
    rank_step: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    slices: Sequence[int],
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (delta,). With `pdl`, the previous launch in the stream must write neither the plan nor b.

    Ignores `sm_budget`. Raises ValueError if `fits` returns a reason.
    """
    _check_ranks(ranks, rank_step, b, b_scale, slices)
    rank = b.shape[2]
    objection = fits(rank)
    if objection:
        raise ValueError(f"lora_expand_rounded: {objection}; use lora_expand")
    require_contiguous(
        "lora_expand_rounded", ranks=ranks, rank_step=rank_step, b=b, b_scale=b_scale, token_order=token_order,
        tiles=tiles,
    )  # fmt: skip
    if ranks.numel() == 0:
        return
    widths = [*slices, 0, 0][:3]
    warps = min(WARPS, next_power_of_2(cdiv(max(slices), 32)))
    blocks, groups = sum(cdiv(width, 32 * warps) for width in slices), cdiv(tile, TOKENS)
    expand_rounded_kernel[(tiles.shape[0] * groups * blocks,)](
        ranks, rank_step, b, b_scale, token_order, tiles, out[0], blocks, groups, *widths, LINEARS=len(slices),
        RANK=rank, RANKS=max(32, next_power_of_2(rank)), WARPS=warps, num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip


lora_expand_rounded = register(
    "lora_expand_rounded",
    lora_expand_rounded_reference,
    lora_expand_rounded_fake,
    lora_expand_rounded_launch,
    kind="lora_expand",
    family="lora",
)
