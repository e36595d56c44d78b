"""Tickets, signals between ranks, and rows of peers, for the kernels of collectives (correctness: exchange.py).

Memory order, in PTX's model. The sender: writes of the program, a CTA barrier, then one thread's `fence.acq_rel.sys`
and relaxed stores of the epoch to the peers. The receiver: one thread per flag polls it with `ld.acquire.sys` until it
has reached the epoch, then a CTA barrier. Rows are stored before the first barrier and loaded after the second, by
plain instructions. The launch, or `griddepcontrol.wait`, orders writes of earlier kernels.
"""

import triton
import triton.language as tl

from ..core.triton_support import INTERP, in_fp32
from . import exchange

BITS = tl.constexpr(16)  # an epoch has 2^BITS tickets: more than the rows of a launch
EVERYBODY = tl.constexpr(-1)
READY, EPOCH = tl.constexpr(exchange.READY), tl.constexpr(exchange.EPOCH)


@triton.jit
def take_ticket(memory, rows):
    """Return (epoch, row): the number of this launch, from 1 on and equal on all ranks, and the next free row.

    A launch uses exactly 2^BITS tickets: one per program (`rows`), and the last program adds the rest. So the count
    needs no reset, and every program gets the epoch of its own launch.
    """
    counter = memory.to(tl.pointer_type(tl.int64))
    ticket = tl.atomic_add(counter, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")
    row = ticket & (2**BITS - 1)
    if row == rows - 1:
        tl.atomic_add(counter, tl.full((), 2**BITS, tl.int64) - rows, sem="relaxed", scope="gpu")
    return (ticket >> BITS) + 1, row


@triton.jit
def flags_of(row, DONE: tl.constexpr, WORLD: tl.constexpr):
    """Return (offset of the ranks' epochs of a row, offset of its owner's epoch), in bytes."""
    return READY + row * (WORLD * EPOCH), DONE + row * EPOCH


@triton.jit
def signal(memories, offset, epoch, only, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Store `epoch` at byte `offset` of every peer's memory, or only of rank `only`'s.

    After a rank has read it, all earlier writes of this program are visible to that rank.
    """
    tl.debug_barrier()
    if not INTERP:
        tl.inline_asm_elementwise(
            """{ .reg .pred first;
                 .reg .b32 thread;
                 mov.u32 thread, %tid.x;
                 setp.eq.u32 first, thread, 0;
                 @first fence.acq_rel.sys;
                 mov.b32 $0, 0; }""",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    for rank in tl.static_range(WORLD):
        if rank != RANK:  # noqa: SIM102
            if (only == EVERYBODY) | (only == rank):  # at run time; the first test is a constant
                _store_flag(memories[rank] + offset, epoch)


@triton.jit
def _store_flag(address, epoch):
    if INTERP:
        tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), epoch, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{ .reg .pred first;
                 .reg .b32 thread;
                 mov.u32 thread, %tid.x;
                 setp.eq.u32 first, thread, 0;
                 @first st.relaxed.sys.global.b64 [$1], $2;
                 mov.b32 $0, 0; }""",
            "=r,l,l",
            [address.to(tl.int64), epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def await_flags(address, epoch, COUNT: tl.constexpr, OWN: tl.constexpr):
    """Wait until COUNT flags from `address` on, in this rank's memory, have reached `epoch`, except the flag OWN.

    Writes before the stores of the flags are visible then.
    """
    if INTERP:
        flags = address.to(tl.pointer_type(tl.int64))
        for flag in tl.static_range(COUNT):
            if flag != OWN:
                while tl.atomic_add(flags + flag, tl.full((), 0, tl.int64), sem="acquire", scope="sys") < epoch:
                    pass
    else:
        tl.inline_asm_elementwise(
            """{ .reg .pred skips, early;
                 .reg .b32 thread;
                 .reg .b64 flag, found;
                 mov.u32 thread, %tid.x;
                 setp.ge.u32 skips, thread, $3;
                 @skips bra arrived;
                 setp.eq.u32 skips, thread, $4;
                 @skips bra arrived;
                 mul.wide.u32 flag, thread, 8;
                 add.s64 flag, flag, $1;
               again:
                 ld.acquire.sys.global.b64 found, [flag];
                 setp.lt.s64 early, found, $2;
                 @early bra again;
               arrived:
                 mov.b32 $0, 0; }""",
            "=r,l,l,r,r",
            [address.to(tl.int64), epoch, COUNT, OWN],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def memory_of(memories, rank, WORLD: tl.constexpr):
    """Return the memory of `rank`, which is known only at run time."""
    chosen = memories[0]
    for other in tl.static_range(1, WORLD):
        chosen = tl.where(rank == other, memories[other], chosen)
    return chosen


@triton.jit
def row_of(memory, offset, dtype: tl.constexpr):
    """Return a pointer to the values at a byte offset of a rank's memory."""
    return (memory + offset).to(tl.pointer_type(dtype))


@triton.jit
def add_up(mine, memories, offset, column, inside, dtype: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Return the fp32 sum of every rank's part of a row, in rank order.

    This rank's part is `mine`, those of the others are at byte `offset` of their memories, all of `dtype`.
    """
    total = in_fp32(mine)
    for rank in tl.static_range(WORLD):
        part = mine
        if rank != RANK:
            part = tl.load(row_of(memories[rank], offset, dtype) + column, mask=inside, other=0.0)
        if rank == 0:
            total = in_fp32(part)
        else:
            total += in_fp32(part)
    return total
