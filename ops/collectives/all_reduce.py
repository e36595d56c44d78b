"""`all_reduce`: the sum of all ranks' partial results, with the same bits on all ranks.

GPUs that share memory (exchange.py) run one kernel, one program per row. One-shot: each rank reads the row from all
peers. Two-shot: a row's owner (row % world) reads it, and the others read the sum from the owner. Other GPUs and CPUs
use the group's process group.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import pdl_options, pdl_start, require_contiguous, round_to
from .exchange import exchange_of, is_one_shot
from .signals import EPOCH, EVERYBODY, add_up, await_flags, flags_of, memory_of, row_of, signal, take_ticket
from .tensor_parallel_group import group_named


def add_in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the fp32 sum of all ranks' parts, with the same bits on every rank."""
    first, *others = parts
    total = first.to(torch.float32, copy=True)
    for part in others:
        total += part
    return total


def reference(partial: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of partial [..., H] over the ranks of `group`, in rank order in fp32, in partial's dtype."""
    return add_in_rank_order(group_named(group).gather(partial)).to(partial.dtype)


def fake(partial: torch.Tensor, group: str) -> torch.Tensor:
    """Return an empty result."""
    return partial.new_empty(partial.shape)


@triton.jit
def _all_reduce_kernel(
    partial, out, memories, rows, placed, slot_bytes, RANK: tl.constexpr, WORLD: tl.constexpr, PLACED: tl.constexpr,
    ONE_SHOT: tl.constexpr, DONE: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = partial.dtype.element_ty
    ROW_BYTES: tl.constexpr = WIDTH * (dtype.primitive_bitwidth // 8)
    memory = memories[RANK]
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    pdl_start(PDL)
    epoch, row = take_ticket(memory, rows)
    at = row * WIDTH + column
    ready, done = flags_of(row, DONE, WORLD)
    slot = SLOTS + (epoch & 1) * slot_bytes + row * ROW_BYTES
    source = placed + row * ROW_BYTES if PLACED else slot
    mine = tl.load(partial + at, mask=inside, other=0.0)
    if not PLACED:
        tl.store(row_of(memory, slot, dtype) + column, mine, mask=inside)
    owner = row % WORLD
    signal(memories, ready + RANK * EPOCH, epoch, EVERYBODY if ONE_SHOT else owner, RANK, WORLD)
    if ONE_SHOT:
        await_flags(memory + ready, epoch, WORLD, RANK)
        total = add_up(mine, memories, source, column, inside, dtype, RANK, WORLD)
        tl.store(out + at, round_to(total, dtype), mask=inside)
    elif owner == RANK:
        await_flags(memory + ready, epoch, WORLD, RANK)
        total = round_to(add_up(mine, memories, source, column, inside, dtype, RANK, WORLD), dtype)
        tl.store(row_of(memory, slot, dtype) + column, total, mask=inside)
        signal(memories, done, epoch, EVERYBODY, RANK, WORLD)
        tl.store(out + at, total, mask=inside)
    else:
        await_flags(memory + done, epoch, 1, -1)
        total = tl.load(row_of(memory_of(memories, owner, WORLD), slot, dtype) + column, mask=inside, other=0.0)
        tl.store(out + at, total, mask=inside)


def launch(
    partial: torch.Tensor,
    group: str,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
    one_shot: Optional[bool] = None,
) -> None:
    """Fill `out` = (sum,), through the process group if there is no shared memory.

    `one_shot` overrides the choice by size. Ignores `sm_budget`: one program per row.
    """
    exchange = exchange_of(group, partial.device)
    if exchange is None:
        out[0].copy_(reference(partial, group))
        return
    require_contiguous("all_reduce", partial=partial)
    if one_shot is None:
        one_shot = is_one_shot(partial.nbytes, exchange.world)
    parts, sums = partial.flatten(0, -2), out[0].flatten(0, -2)
    for rows, arguments in exchange.launches("all_reduce", partial, placed=True):
        _all_reduce_kernel[arguments["rows"],](
            parts[rows], sums[rows], exchange.memories, **arguments, ONE_SHOT=one_shot, **pdl_options(pdl)
        )


all_reduce = register("all_reduce", reference, fake, launch, kind="collective", family="collective")
