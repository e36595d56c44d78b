"""Products of LoRA's rounded ranks and int8 rows of B in which nothing goes through shared memory.

The ranks are `lora_round`'s. A product is one of whole numbers: widening B's int8 rows to bf16 costs more instructions
than the rest of it.
"""

import triton
import triton.language as tl

from ..core.triton_support import INTERP

MAX_RANK = 64
# of 1.5 * 2**23: whole numbers below 2**22 added to these bits are added to that value
MAGIC_BITS = tl.constexpr(0x4B400000)
MAGIC = tl.constexpr(12582912.0)


def fits(rank: int) -> str | None:
    """Why the products don't take stacks of this rank; None if they do."""
    return (
        None
        if 8 <= rank <= MAX_RANK and rank % 8 == 0
        else f"LoRA stacks of rank {rank}; it takes multiples of 8 up to {MAX_RANK}"
    )


# Triton deals the rows of a matrix that is loaded by 8 or 16 bytes to the lanes first, then to the warps, then to the
# registers. The rows of the loads below are such that a thread loads what it holds of the product's operands or result,
# and nothing goes through shared memory. A warp has a product of its own, of 16 tokens and 32 columns: of these a
# thread has pairs of columns of blocks of 8, and pairs of four blocks are neighbours in memory here; of 32 ranks it has
# 4 in each half, and these are neighbours here.
@triton.jit
def load_b(b, begin, end, slot, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr):
    """B's rows for 32 * WARPS columns from `begin` as the product's operand, int8 [WARPS, RANKS, 32]; zeros from
    column `end` on and without an adapter.
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
    """The scales of these columns, [1, WARPS, 8, 32] with the same in each of the 8; zeros where there are none."""
    row = tl.arange(0, WARPS * 64)[:, None]
    column = begin + row // 32 % WARPS * 32 + row % 4 * 8 + row // (32 * WARPS) * 4 + tl.arange(0, 4)[None, :]
    scale = tl.load(b_scale + column, mask=column < tl.where(slot >= 0, end, 0), other=0.0)
    return tl.reshape(tl.permute(tl.reshape(scale, (2, WARPS, 8, 4, 4)), (1, 2, 3, 0, 4)), (1, WARPS, 8, 32))


@triton.jit
def load_tokens(token_order, first, count, WARPS: tl.constexpr):
    """16 tokens, each where its ranks and its part of the result lie: int64 [WARPS * 64, 1], -1 past the last one."""
    row = tl.arange(0, WARPS * 64)[:, None]
    lane = row // (32 * WARPS) * 8 + row // 4 % 8
    return tl.load(token_order + first + lane, mask=lane < count, other=-1).to(tl.int64)


@triton.jit
def columns_of(begin, WARPS: tl.constexpr):
    """32 * WARPS columns beside them, [WARPS * 64, 8]."""
    row = tl.arange(0, WARPS * 64)[:, None]
    return begin + row // 32 % WARPS * 32 + row % 4 * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def load_ranks(
    ranks, token, linear, LINEARS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr
):
    """Of 16 tokens the ranks of one of LINEARS linears as the product's other operand, int8 [WARPS, 16, RANKS]
    (every warp loads all of them).
    """
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
    """The steps of these ranks, fp32 [WARPS * 64, 1]; zeros where there is no adapter."""
    step = tl.load(rank_step + token * LINEARS + linear, mask=tl.where(slot >= 0, token, -1) >= 0, other=0.0)
    # 22 bits: its product with MAGIC is exact
    return (step.to(tl.int32, bitcast=True) & -4).to(tl.float32, bitcast=True)


@triton.jit
def product(q, step, rows, WARPS: tl.constexpr):
    """q @ rows times the tokens' steps, fp32 [2, WARPS, 8, 32]: the elements of [WARPS * 64, 8] (`load_tokens`,
    `columns_of`), and in the same threads.
    """
    total = tl.dot(q, rows, tl.full([WARPS, 16, 32], MAGIC_BITS, tl.int32), out_dtype=tl.int32)
    total = tl.permute(tl.reshape(total, (WARPS, 2, 8, 4, 4, 2)), (1, 0, 2, 4, 3, 5))
    # converting whole numbers takes four times as long as this sum
    total = tl.reshape(total, (2, WARPS, 8, 32)).to(tl.float32, bitcast=True)
    step = tl.reshape(tl.broadcast_to(step, (WARPS * 64, 8)), (2, WARPS, 8, 32))
    if INTERP:  # its multiply-add rounds twice
        return (total - MAGIC) * step
    else:
        return tl.fma(total, step, step * -MAGIC)
