"""The second half of LoRA from ranks that `lora_round` has added up and rounded, beside a projection that leaves it
little room.

A program of `lora_expand` adds up a token's ranks from fp32 planes, which are sixteen and more times their bytes here,
and widens B's rows. Here one load of a few bytes a token is behind the wait, and a product of whole numbers takes 40
registers and no shared memory.
"""

from collections.abc import Sequence
from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, next_power_of_2, pdl_options, pdl_start, require_contiguous, round_to
from .expand import place_of
from .rounded_pieces import columns_of, fits, load_b, load_ranks, load_scale, load_step, load_tokens, product
from .shrink import dequantized

WARPS = 4  # of a program, 32 columns each
TOKENS = 16  # of a program


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
    """delta[t, slice i] = ranks[t, i*R:(i+1)*R] @ b[slot of t, slice i]^T * rank_step[t, i] * b_scale[slot of t, slice
    i].

    ranks, rank_step   [T, n*R] int8, [T, n] fp32: `lora_round`'s; those of tokens without an adapter may hold anything
    b, b_scale         [S, N, R] int8, [S, N] fp32; alpha / rank already folded in
    token_order, tiles, tile   of `lora_plan`
    slices             the n output widths of the packed linears, adding up to N
    returns            [T, N] bf16, rounded once from fp32; zeros for tokens without an adapter
    """
    check(ranks, rank_step, b, b_scale, slices)
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
    check(ranks, rank_step, b, b_scale, slices)
    return b.new_empty((ranks.shape[0], b.shape[1]), dtype=torch.bfloat16)


def check(
    ranks: torch.Tensor, rank_step: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, slices: Sequence[int]
) -> None:
    """Raises ValueError for shapes and dtypes that are not those of `lora_expand_rounded_reference`."""
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
    """A program for 16 tokens of a tile and 32 * WARPS columns of one slice; those of unused tiles and tokens end at
    once.
    """
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
    """Fill `out` = (delta,). With `pdl`, the launch before it in the stream is taken to be neither the plan's nor the
    one that wrote b.

    Does not heed `sm_budget`. Raises ValueError where `fits` objects.
    """
    check(ranks, rank_step, b, b_scale, slices)
    rank = b.shape[2]
    objection = fits(rank)
    if objection:
        raise ValueError(f"lora_expand_rounded: {objection}; lora_expand does")
    require_contiguous(
        "lora_expand_rounded",
        ranks=ranks,
        rank_step=rank_step,
        b=b,
        b_scale=b_scale,
        token_order=token_order,
        tiles=tiles,
    )
    if ranks.numel() == 0:
        return
    widths = [*slices, 0, 0][:3]
    warps = min(WARPS, next_power_of_2(cdiv(max(slices), 32)))
    blocks, groups = sum(cdiv(width, 32 * warps) for width in slices), cdiv(tile, TOKENS)
    expand_rounded_kernel[(tiles.shape[0] * groups * blocks,)](
        ranks,
        rank_step,
        b,
        b_scale,
        token_order,
        tiles,
        out[0],
        blocks,
        groups,
        *widths,
        LINEARS=len(slices),
        RANK=rank,
        RANKS=max(32, next_power_of_2(rank)),
        WARPS=warps,
        num_warps=warps,
        **pdl_options(pdl),
    )


lora_expand_rounded = register(
    "lora_expand_rounded",
    lora_expand_rounded_reference,
    lora_expand_rounded_fake,
    lora_expand_rounded_launch,
    kind="lora",
    family="lora",
)
