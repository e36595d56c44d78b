"""The second half of LoRA: the ranks of `lora_shrink` up to the linear's output width."""
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .attention_pieces import dot_ieee, multiprocessors
from .registry import register
from .triton_support import cdiv, next_power_of_2, pdl_options, pdl_start, require_contiguous

CTAS_PER_SM = 4  # programs that an SM holds at once


def lora_expand_reference(planes: torch.Tensor, b: torch.Tensor, token_order: torch.Tensor, tiles: torch.Tensor, tile: int,
                          slices: Sequence[int]) -> torch.Tensor:
    """delta[t, slice i] = (sum of planes[:, t, i*R:(i+1)*R], rounded to b's dtype) @ b[slot of t, slice i]^T.

    planes       [splits, T, n*R] fp32, added in order
    b            [S, N, R] model dtype, alpha / rank already folded in
    token_order, tiles, tile   of `lora_plan`
    slices       the n output widths of the packed linears, adding up to N
    returns      [T, N] in b's dtype; zeros for tokens without an adapter
    """
    ranks = b.shape[2]
    delta = torch.zeros(planes.shape[1], b.shape[1], dtype=b.dtype, device=b.device)
    shrunk = planes[0]
    for plane in planes[1:]:
        shrunk = shrunk + plane
    shrunk = shrunk.to(b.dtype).float()
    for slot, first, count in tiles.tolist():
        if slot < 0:
            continue
        tokens = token_order[first:first + count].long()
        start = 0
        for i, width in enumerate(slices):
            product = shrunk[tokens, i * ranks:(i + 1) * ranks] @ b[slot, start:start + width].float().T
            delta[tokens, start:start + width] = product.to(b.dtype)
            start += width
    return delta


def lora_expand_fake(planes: torch.Tensor, b: torch.Tensor, token_order: torch.Tensor, tiles: torch.Tensor, tile: int, slices: Sequence[int]) -> torch.Tensor:
    return b.new_empty((planes.shape[1], b.shape[1]))


@triton.jit
def _column_block(item, blocks_per_tile, WIDTH0, WIDTH1, WIDTH2, COLUMNS: tl.constexpr):
    """(slice, first column, end of the slice) of a piece of work: blocks of COLUMNS columns are counted slice by slice, so that none straddles two."""
    block = item % blocks_per_tile
    blocks0 = tl.cdiv(WIDTH0, COLUMNS)
    blocks1 = tl.cdiv(WIDTH1, COLUMNS)
    part = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, WIDTH0, WIDTH0 + WIDTH1))
    width = tl.where(part == 0, WIDTH0, tl.where(part == 1, WIDTH1, WIDTH2))
    block -= tl.where(part == 0, 0, tl.where(part == 1, blocks0, blocks0 + blocks1))
    return part, begin + block * COLUMNS, begin + width


@triton.jit
def _load_b(b, tiles, item, work, blocks_per_tile, n, ranks, WIDTH0, WIDTH1, WIDTH2, COLUMNS: tl.constexpr, RANKS: tl.constexpr):
    """B's rows for a piece of work; zeros past the last one and for tokens without adapter."""
    slot = tl.load(tiles + tl.minimum(item, work - 1) // blocks_per_tile * 3)
    _, begin, end = _column_block(item, blocks_per_tile, WIDTH0, WIDTH1, WIDTH2, COLUMNS)
    end = tl.where((item < work) & (slot >= 0), end, 0)
    column = begin + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANKS)
    rows = b + slot.to(tl.int64) * n * ranks + column[:, None] * ranks + rank[None, :]
    return tl.load(rows, mask=(column < end)[:, None] & (rank < ranks)[None, :], other=0.0)


@triton.jit
def expand_kernel(planes, b, token_order, tiles, delta, num_tokens, n, ranks, all_ranks, num_tiles, blocks_per_tile, WIDTH0, WIDTH1, WIDTH2,
                  SPLITS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr):
    """One piece of work = (tile, block of COLUMNS columns of one slice): delta[tile's tokens, columns] = (B rows @ shrunk^T)^T."""
    work = num_tiles * blocks_per_tile
    item = tl.program_id(0)
    # the plan and B are older than the shrink that is waited for
    b_rows = _load_b(b, tiles, item, work, blocks_per_tile, n, ranks, WIDTH0, WIDTH1, WIDTH2, COLUMNS, RANKS)
    pdl_start(PDL)
    while item < work:
        tile_row = tiles + item // blocks_per_tile * 3
        slot, first, count = tl.load(tile_row), tl.load(tile_row + 1), tl.load(tile_row + 2)
        if count == 0:
            item = work  # unused tiles are the last ones
        else:
            part, begin, end = _column_block(item, blocks_per_tile, WIDTH0, WIDTH1, WIDTH2, COLUMNS)
            lane = tl.arange(0, TILE)
            rank = tl.arange(0, RANKS)
            token = tl.load(token_order + first + lane, mask=lane < count, other=0)
            source = planes + token[None, :] * all_ranks + part * ranks + rank[:, None]
            wanted = (lane < tl.where(slot >= 0, count, 0))[None, :] & (rank < ranks)[:, None]
            shrunk = tl.zeros([RANKS, TILE], tl.float32)
            for plane in tl.static_range(SPLITS):
                shrunk += tl.load(source + plane * num_tokens * all_ranks, mask=wanted, other=0.0)
            result = dot_ieee(b_rows, shrunk.to(b_rows.dtype), tl.zeros([COLUMNS, TILE], tl.float32))
            column = begin + tl.arange(0, COLUMNS)
            target = delta + token[None, :].to(tl.int64) * n + column[:, None]
            tl.store(target, result.to(b_rows.dtype), mask=(lane < count)[None, :] & (column < end)[:, None])
            item += tl.num_programs(0)
            b_rows = _load_b(b, tiles, item, work, blocks_per_tile, n, ranks, WIDTH0, WIDTH1, WIDTH2, COLUMNS, RANKS)


def expand_columns(ranks: int, tile: int, widest: int, itemsize: int) -> int:
    """Output columns of one piece of work: enough that the planes' sum is not repeated too often, few enough to stay in registers."""
    limit = 32 if itemsize == 4 else 128 if tile in (16, 64) else 256
    return max(16, min(limit, 8192 // next_power_of_2(ranks), next_power_of_2(widest)))


def lora_expand_launch(planes: torch.Tensor, b: torch.Tensor, token_order: torch.Tensor, tiles: torch.Tensor, tile: int, slices: Sequence[int],
                       *, out: tuple[torch.Tensor, ...], sm_budget: int | None = None, pdl: bool = False) -> None:
    """With `pdl`, the launch before it in the stream is taken to be neither the plan's nor the one that wrote b.

    ValueError unless there are 1 to 3 slices that add up to b's width, and planes hold R ranks for each.
    """
    splits, tokens, all_ranks = planes.shape
    _, n, ranks = b.shape
    require_contiguous("lora_expand", planes=planes, b=b, delta=out[0])
    if not 1 <= len(slices) <= 3 or sum(slices) != n or all_ranks != len(slices) * ranks:
        raise ValueError(f"lora_expand: slices {list(slices)} and planes {tuple(planes.shape)} do not fit b {tuple(b.shape)}: needs 1 to 3 slices that add up "
                         f"to {n}, and {ranks} ranks for each")
    if tokens == 0:
        return
    columns = expand_columns(ranks, tile, max(slices), b.element_size())
    blocks_per_tile = sum(cdiv(width, columns) for width in slices)
    widths = [*slices, 0, 0][:3]
    programs = CTAS_PER_SM * (multiprocessors(b.device) if sm_budget is None else sm_budget)
    expand_kernel[(min(programs, tiles.shape[0] * blocks_per_tile),)](
        planes, b, token_order, tiles, out[0], tokens, n, ranks, all_ranks, tiles.shape[0], blocks_per_tile, *widths, SPLITS=splits, TILE=tile,
        COLUMNS=columns, RANKS=next_power_of_2(ranks), num_warps=4, **pdl_options(pdl))


lora_expand = register("lora_expand", lora_expand_reference, lora_expand_fake, lora_expand_launch)
