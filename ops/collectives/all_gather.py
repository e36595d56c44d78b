"""`all_gather`: the concatenated columns of all ranks, such as the logits of a sharded vocabulary.

GPUs that share memory (exchange.py) run one kernel: each program writes a block of its rank's part where the peers can
read it, and then copies the same block of every peer. CPUs use the group's process group.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, pdl_options, pdl_start
from .exchange import MOST_ROWS, exchange_of, slots_at
from .signals import EPOCH, EVERYBODY, READY, await_flags, row_of, signal, take_ticket
from .tensor_parallel_group import group_named

BLOCK = 4096
"""Words of 4 bytes that a program copies."""


def gather_parts(part: torch.Tensor, group: str, pdl: bool = False) -> torch.Tensor:
    """Return the parts of all ranks, of this shape and dtype, in rank order: [world, *part.shape]."""
    exchange = exchange_of(group, part.device)
    if exchange is None:
        return torch.stack(group_named(group).gather(part))
    own = part.contiguous().flatten().view(torch.uint8)
    quads = cdiv(own.numel(), 16)
    if own.numel() % 16:
        own = torch.nn.functional.pad(own, (0, 16 * quads - own.numel()))
    parts = own.new_empty(exchange.world, 16 * quads)
    blocks, at_once = cdiv(4 * quads, BLOCK), min(exchange.slot_bytes // (4 * BLOCK), MOST_ROWS)
    for first in range(0, blocks, at_once):
        rows = min(at_once, blocks - first)
        _all_gather_kernel[rows,](
            own.view(torch.int32), parts.view(torch.int32), exchange.memories, rows, first, quads, exchange.slot_bytes,
            RANK=exchange.rank, WORLD=exchange.world, SLOTS=slots_at(exchange.world), BLOCK=BLOCK, num_warps=8,
            **pdl_options(pdl),
        )  # fmt: skip
    return parts[:, : part.nbytes].view(part.dtype).view(exchange.world, *part.shape)


@triton.jit(do_not_specialize=["rows", "first", "quads"])
def _all_gather_kernel(
    own, parts, memories, rows, first, quads, slot_bytes, RANK: tl.constexpr, WORLD: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather `rows` blocks of every rank from block `first` on. own [4 * quads], parts [WORLD, 4 * quads]: int32."""
    memory = memories[RANK]
    pdl_start(PDL)
    epoch, row = take_ticket(memory, rows)
    words = quads.to(tl.int64) * 4  # a product, so that accesses are known to be 16 bytes wide
    block = row * BLOCK + tl.arange(0, BLOCK)  # within the slot
    word = first * BLOCK + block
    inside = word < words
    ready = READY + row * (WORLD * EPOCH)
    slot = SLOTS + (epoch & 1) * slot_bytes
    mine = tl.load(own + word, mask=inside)
    tl.store(row_of(memory, slot, tl.int32) + block, mine, mask=inside)
    signal(memories, ready + RANK * EPOCH, epoch, EVERYBODY, RANK, WORLD)
    await_flags(memory + ready, epoch, WORLD, RANK)
    for rank in tl.static_range(WORLD):
        theirs = mine
        if rank != RANK:
            theirs = tl.load(row_of(memories[rank], slot, tl.int32) + block, mask=inside)
        tl.store(parts + rank * words + word, theirs, mask=inside)


def reference(part: torch.Tensor, group: str, columns: int) -> torch.Tensor:
    """Return all ranks' parts [..., N], concatenated in rank order without padding: [..., columns]."""
    return _joined(torch.stack(group_named(group).gather(part)), columns)


def _joined(parts: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.cat(list(parts), dim=-1)[..., :columns].contiguous()


def fake(part: torch.Tensor, group: str, columns: int) -> torch.Tensor:
    """Return an empty result."""
    return part.new_empty((*part.shape[:-1], columns))


def launch(
    part: torch.Tensor,
    group: str,
    columns: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (columns of all ranks,). Ignores `sm_budget`: one program per block."""
    out[0].copy_(_joined(gather_parts(part, group, pdl), columns))


all_gather = register("all_gather", reference, fake, launch, kind="collective", family="collective")
