"""What the kernels of collectives are made of: tickets, signals between ranks, and rows of peers (exchange.py says why
this is enough).

Memory order, in PTX's model: a program's writes, then a CTA barrier, then one thread's `fence.acq_rel.sys` and relaxed
stores of the epoch to the peers. There one thread for each flag reads it with `ld.acquire.sys` until it has reached the
epoch, then a CTA barrier. Loads and stores of rows are plain ones, outside of these two barriers. Writes of earlier
kernels are ordered by the launch, or by `griddepcontrol.wait`.
"""

import triton
import triton.language as tl

from ..core.triton_support import INTERP, in_fp32
from . import exchange

BITS = tl.constexpr(16)  # 2^BITS tickets are an epoch: more than rows of a launch
EVERYBODY = tl.constexpr(-1)
READY, EPOCH = tl.constexpr(exchange.READY), tl.constexpr(exchange.EPOCH)


@triton.jit
def take_ticket(memory, rows):
    """(epoch from 1 on, row): which launch this is, counted alike on all ranks, and the next row that no program has.

    A launch takes exactly 2^BITS tickets: one each of its `rows` programs, and the last of these takes those that are
    left. So the count needs no reset, and no program can see it too far on.
    """
    counter = memory.to(tl.pointer_type(tl.int64))
    ticket = tl.atomic_add(counter, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")
    row = ticket & (2**BITS - 1)
    if row == rows - 1:
        tl.atomic_add(counter, tl.full((), 2**BITS, tl.int64) - rows, sem="relaxed", scope="gpu")
    return (ticket >> BITS) + 1, row


@triton.jit
def flags_of(row, DONE: tl.constexpr, WORLD: tl.constexpr):
    """(where the ranks' epochs of a row begin, where its owner's lies), bytes of a memory."""
    return READY + row * (WORLD * EPOCH), DONE + row * EPOCH


@triton.jit
def signal(memories, offset, epoch, only, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Store `epoch` at byte `offset` of every peer's memory, or of rank `only`'s: all that this program has written
    before can be read there by who sees it.
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
            if (only == EVERYBODY) | (only == rank):  # at run time, unlike the first
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
    """Wait until COUNT flags from `address` on, in this rank's memory, have reached `epoch`, the one at OWN excepted:
    what was written before they were stored can be read then.
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
    """The memory of a rank that is known only when the kernel runs."""
    chosen = memories[0]
    for other in tl.static_range(1, WORLD):
        chosen = tl.where(rank == other, memories[other], chosen)
    return chosen


@triton.jit
def row_of(memory, offset, dtype: tl.constexpr):
    """A pointer to the values that lie at a byte of a rank's memory."""
    return (memory + offset).to(tl.pointer_type(dtype))


@triton.jit
def add_up(mine, memories, offset, column, inside, dtype: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """fp32 sum of every rank's part of a row, in rank order: this rank's is `mine`, the others' lie at byte `offset` of
    their memories, all of `dtype`.
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
