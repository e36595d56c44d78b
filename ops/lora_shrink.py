"""The first half of LoRA: every token's hidden state down to its adapter's ranks, as split-K planes that `lora_expand` adds up in order."""
import torch
import triton
import triton.language as tl

from .attention_pieces import dot_ieee, multiprocessors
from .registry import register
from .triton_support import INTERP, cdiv, next_power_of_2, pdl_options, require_contiguous

CTAS_PER_SM = 16  # programs for each SM, at most
MAX_ONCE = 512  # input features that a program can hold in registers at once


def split_width(k: int, splits: int) -> int:
    """Input features of one split-K plane (a multiple of 128; the last planes may hold fewer, or none)."""
    return cdiv(cdiv(k, splits), 128) * 128


def lora_shrink_reference(x: torch.Tensor, a: torch.Tensor, token_order: torch.Tensor, tiles: torch.Tensor, tile: int, splits: int) -> torch.Tensor:
    """planes[p, t] = x[t, chunk p] @ a[slot of t, :, chunk p]^T in fp32.

    x            [T, K] model dtype
    a            [S, n*R, K] like x: the A matrices of S adapters, those of n packed linears under each other; n*R a multiple of 16
    token_order, tiles, tile   of `lora_plan`
    returns      [splits, T, n*R] fp32; rows of tokens without an adapter are zero. Chunk p is columns p*w .. (p+1)*w, w = split_width(K, splits)
    """
    k, width = x.shape[1], split_width(x.shape[1], splits)
    planes = torch.zeros(splits, x.shape[0], a.shape[1], dtype=torch.float32, device=x.device)
    for slot, first, count in tiles.tolist():
        if slot < 0:
            continue
        tokens = token_order[first:first + count].long()
        for plane in range(splits):
            chunk = slice(min(k, plane * width), min(k, (plane + 1) * width))
            planes[plane, tokens] = x[tokens, chunk].float() @ a[slot, :, chunk].float().T
    return planes


def lora_shrink_fake(x: torch.Tensor, a: torch.Tensor, token_order: torch.Tensor, tiles: torch.Tensor, tile: int, splits: int) -> torch.Tensor:
    return x.new_empty((splits, x.shape[0], a.shape[1]), dtype=torch.float32)


@triton.jit
def _start(PDL: tl.constexpr):
    """Waits, and only then lets the expand launch: one that starts early has the guarantee that everything before the shrink (the plan) is complete."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not INTERP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def shrink_once_kernel(x, a, token_order, tiles, planes, num_tokens, k, ranks, width, rank_blocks, splits, TILE: tl.constexpr, RANKS: tl.constexpr,
                       BLOCK_K: tl.constexpr, ORDER: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr):
    """A program for each piece of work, which it loads at once: planes[split, tile's tokens, ranks] = (A rows @ x^T)^T for a (tile, split, block of ranks).

    Beside a base GEMM that keeps every queue full a load takes microseconds: as few as possible depend on each other.
    """
    _start(PDL)
    place = tl.arange(0, ORDER)
    order = tl.load(token_order + place, mask=place < num_tokens, other=0)  # all of it, since the part that is needed is not known yet
    row = tiles + tl.program_id(0) // (splits * rank_blocks) * 3
    slot, first, count = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    split = tl.program_id(0) // rank_blocks % splits
    rank = tl.program_id(0) % rank_blocks * RANKS + tl.arange(0, RANKS)
    lane = tl.arange(0, TILE)
    column = split * width + tl.arange(0, BLOCK_K)
    token = tl.gather(order, tl.minimum(first + lane, num_tokens - 1), 0)
    a_inside = (rank < tl.where((slot >= 0) & (count > 0), ranks, 0))[:, None]
    x_inside = (lane < count)[None, :]
    if not EVEN:
        stop = tl.minimum(k, split * width + width)
        a_inside = a_inside & (column < stop)[None, :]
        x_inside = x_inside & (column < stop)[:, None]
    a_part = tl.load(a + slot.to(tl.int64) * ranks * k + rank[:, None] * k + column[None, :], mask=a_inside, other=0.0)
    x_part = tl.load(x + token[None, :] * k + column[:, None], mask=x_inside, other=0.0)
    result = dot_ieee(a_part, x_part, tl.zeros([RANKS, TILE], tl.float32))
    target = planes + (split * num_tokens + token[None, :]) * ranks + rank[:, None]
    tl.store(target, result, mask=(lane < count)[None, :] & (rank < ranks)[:, None])


@triton.jit
def shrink_kernel(x, a, token_order, tiles, planes, num_tokens, k, ranks, width, num_tiles, rank_blocks, splits, TILE: tl.constexpr, RANKS: tl.constexpr,
                  BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr):
    """The same pieces of work for any number of programs and columns: loads pipelined through shared memory."""
    _start(PDL)
    per_tile = splits * rank_blocks
    work = num_tiles * per_tile
    item = tl.program_id(0)
    while item < work:
        tile_row = tiles + item // per_tile * 3
        slot, first, count = tl.load(tile_row), tl.load(tile_row + 1), tl.load(tile_row + 2)
        if count == 0:
            item = work  # unused tiles are the last ones
        else:
            split = item % per_tile // rank_blocks
            rank = item % rank_blocks * RANKS + tl.arange(0, RANKS)
            lane = tl.arange(0, TILE)
            token = tl.load(token_order + first + lane, mask=lane < count, other=0)
            acc = tl.zeros([RANKS, TILE], tl.float32)
            if slot >= 0:
                a_rows = a + slot.to(tl.int64) * ranks * k + rank[:, None] * k
                x_rows = x + token[None, :] * k
                for start in tl.range(split * width, tl.minimum(k, split * width + width), BLOCK_K, num_stages=STAGES):
                    column = start + tl.arange(0, BLOCK_K)
                    if EVEN:
                        a_part = tl.load(a_rows + column[None, :])
                        x_part = tl.load(x_rows + column[:, None], mask=(lane < count)[None, :], other=0.0)
                    else:
                        a_part = tl.load(a_rows + column[None, :], mask=(rank < ranks)[:, None] & (column < k)[None, :], other=0.0)
                        x_part = tl.load(x_rows + column[:, None], mask=(lane < count)[None, :] & (column < k)[:, None], other=0.0)
                    acc = dot_ieee(a_part, x_part, acc)
            target = planes + (split * num_tokens + token[None, :]) * ranks + rank[:, None]
            tl.store(target, acc, mask=(lane < count)[None, :] & (rank < ranks)[:, None])
            item += tl.num_programs(0)


def once_block(ranks: int, width: int) -> tuple[int, int, int]:
    """(ranks, input features, warps) of a program of `shrink_once_kernel` for planes of `width` input features."""
    block_k = next_power_of_2(width)
    return 32 if ranks % 32 == 0 else 16, block_k, 8 if block_k >= 512 else 4


def loop_block(ranks: int, tile: int, itemsize: int) -> tuple[int, int]:
    """(ranks, input features) of a step of `shrink_kernel`: x is read once for each block of ranks, so few blocks for many tokens."""
    if itemsize == 4:
        return 16, 32
    if tile < 64:
        return 32 if ranks % 32 == 0 else 16, 128
    return next_power_of_2(cdiv(ranks, cdiv(ranks, 128))), 64


def lora_shrink_launch(x: torch.Tensor, a: torch.Tensor, token_order: torch.Tensor, tiles: torch.Tensor, tile: int, splits: int,
                       *, out: tuple[torch.Tensor, ...], sm_budget: int | None = None, pdl: bool = False) -> None:
    """ValueError unless x and a are contiguous, of one dtype, and a's ranks a multiple of 16."""
    tokens, k = x.shape
    ranks = a.shape[1]
    require_contiguous("lora_shrink", x=x, a=a, planes=out[0])
    if ranks % 16 or a.shape[2] != k or a.dtype != x.dtype:
        raise ValueError(f"lora_shrink: a is {a.dtype}{tuple(a.shape)} for x {x.dtype}{tuple(x.shape)}; "
                         f"needs [slots, ranks (a multiple of 16), {k}] in x's dtype")
    if tokens == 0:
        return
    width = split_width(k, splits)
    programs = CTAS_PER_SM * (multiprocessors(x.device) if sm_budget is None else sm_budget)
    tensors = (x, a, token_order, tiles, out[0])
    if tile < 64 and tokens <= 1024 and width <= MAX_ONCE and x.element_size() == 2:
        rank_block, block_k, warps = once_block(ranks, width)
        rank_blocks = cdiv(ranks, rank_block)
        work = tiles.shape[0] * splits * rank_blocks
        if work <= programs:
            shrink_once_kernel[(work,)](
                *tensors, tokens, k, ranks, width, rank_blocks, splits, TILE=tile, RANKS=rank_block, BLOCK_K=block_k,
                ORDER=max(32, next_power_of_2(tokens)), EVEN=k % width == 0 and width == block_k, num_warps=warps, **pdl_options(pdl))
            return
    rank_block, block_k = loop_block(ranks, tile, x.element_size())
    rank_blocks = cdiv(ranks, rank_block)
    shrink_kernel[(min(programs, tiles.shape[0] * splits * rank_blocks),)](
        *tensors, tokens, k, ranks, width, tiles.shape[0], rank_blocks, splits, TILE=tile, RANKS=rank_block, BLOCK_K=block_k, STAGES=4,
        EVEN=k % block_k == 0 and ranks % rank_block == 0, num_warps=4, **pdl_options(pdl))


lora_shrink = register("lora_shrink", lora_shrink_reference, lora_shrink_fake, lora_shrink_launch)
