"""The steps of LoRA in `decoder_block_lora_gluon.py`:

A times activations by the CTAs that shrink, B times ranks by those that finish a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..core.gluon_support import cta_barrier, plain_layout, view_shared
from .lora_streams import COUNTS, POSITIONS, adapters_per_slot, operand_layout
from .pieces import multiply, to_int8
from .streams import SPLIT, await_count


@gluon.jit
def multiply_slots(
    slots,
    blocks,
    used,
    rows_used,
    steps,
    first,
    second,
    PAIR: gl.constexpr,
    BLOCK_T: gl.constexpr,
    SLOTS: gl.constexpr,
    ROW_SLOTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """`multiply` on the rings as tuples: slots = (ring, ready, empty), blocks = (rows, scales, ready, empty)."""
    return multiply(
        slots[0], slots[1], slots[2], blocks[0], blocks[1], blocks[2], blocks[3], used, rows_used, steps, first, second,
        PAIR, BLOCK_T, SLOTS, ROW_SLOTS, LAYOUT,
    )  # fmt: skip


# Shrinking


@gluon.jit
def _unit_scales(groups, a_scale, first, units, N: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales of the A rows in one slot [128]."""
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    unit = first + row // RANK
    adapter = gl.load(groups + unit // N, mask=unit < units, other=0)
    return gl.load(a_scale + (adapter * N + unit % N) * RANK + row % RANK, mask=unit < units, other=0.0)


@gluon.jit
def shrink(
    slots, blocks, used, rows_used, groups, a_scale, planes, done, share, tokens, steps, N: gl.constexpr,
    RANK: gl.constexpr, STRIDE: gl.constexpr, BLOCK_T: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """All units' ranks over this CTA's part of K -> planes [4, BLOCK_T, STRIDE] fp32, scaled."""
    UNITS: gl.constexpr = 128 // RANK
    units = gl.load(groups + COUNTS) * N
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    token = gl.arange(0, BLOCK_T, gl.SliceLayout(0, LAYOUT))
    nothing = gl.zeros([128, BLOCK_T], gl.float32, LAYOUT)
    for first in range(0, units, 2 * UNITS):
        scale = _unit_scales(groups, a_scale, first, units, N, RANK, LAYOUT)
        second_scale = _unit_scales(groups, a_scale, first + UNITS, units, N, RANK, LAYOUT)
        acc, second, used, rows_used = multiply_slots(
            slots, blocks, used, rows_used, steps, nothing, nothing, True, BLOCK_T, SLOTS, ROW_SLOTS, LAYOUT
        )
        place = first * RANK + row
        out = planes + (share * BLOCK_T + token[None, :]) * STRIDE + place[:, None]
        present = (token < tokens)[None, :]
        gl.store(out, acc * scale[:, None], mask=present & (place < units * RANK)[:, None])
        gl.store(out + 128, second * second_scale[:, None], mask=present & (place + 128 < units * RANK)[:, None])
    if units > 0:  # else nobody waits for it, nor does anything order this behind the counter's clearing
        cta_barrier()
        gl.atomic_add(done, 1, sem="release")
    return used, rows_used


# Expanding


@gluon.jit
def fetch(
    shrunk, factors, planes, done, groups, first_token, linear, N: gl.constexpr, RANK: gl.constexpr,
    STRIDE: gl.constexpr, OWN: gl.constexpr, WIDE: gl.constexpr, BLOCK_T: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The ranks' activations of OWN tokens of one linear, each token's own adapter, in eight bits into `shrunk`
    [WIDE, RANK], their scales into `factors`.
    """
    GATHER: gl.constexpr = gl.BlockedLayout([1, 4], [128 // RANK, RANK // 4], [WARPS, 1], [1, 0])
    await_count(done, SPLIT)
    own = gl.arange(0, WIDE, gl.SliceLayout(1, GATHER))
    rank = gl.arange(0, RANK, gl.SliceLayout(0, GATHER))
    position = gl.load(groups + POSITIONS + first_token + own, mask=own < OWN, other=-1)
    source = planes + ((first_token + own) * STRIDE + (position * N + linear) * RANK)[:, None] + rank[None, :]
    present = (position >= 0)[:, None]
    total = gl.load(source, mask=present, other=0.0, cache_modifier=".cg")
    for part in gl.static_range(1, SPLIT):
        total += gl.load(source + part * (BLOCK_T * STRIDE), mask=present, other=0.0, cache_modifier=".cg")
    if shrunk.dtype == gl.int8:
        step = gl.maximum(gl.max(gl.abs(total), axis=1), 1e-12) * (1.0 / 127.0)
        shrunk.store(to_int8(total * (1.0 / step)[:, None]))
    else:
        step = gl.maximum(gl.max(gl.abs(total), axis=1), 1e-12) * (1.0 / 448.0)
        shrunk.store((total / step[:, None]).to(gl.float8e4nv))
    factors.slice(0, WIDE).store(step)
    fence_async_shared()
    cta_barrier()


@gluon.jit
def _expand_slot(
    slots,
    used,
    shrunk,
    factors,
    total,
    place,
    start,
    RANK: gl.constexpr,
    WIDE: gl.constexpr,
    SLOTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Adds to each token's column the product with its own adapter, if that is one of the slot's."""
    PER: gl.constexpr = adapters_per_slot(RANK)
    slot = used % SLOTS
    mbarrier.wait(slots[1].index(slot), used // SLOTS & 1)
    matrices = view_shared(slots[0].index(slot), shrunk.dtype, [128 // RANK, 128, RANK], operand_layout(RANK))
    row_scales = view_shared(slots[0].index(slot), gl.float32, [32, 1, 128], plain_layout())
    nothing = gl.zeros([128, WIDE], gl.int32 if shrunk.dtype == gl.int8 else gl.float32, LAYOUT)
    for each in range(PER):
        product = warpgroup_mma(matrices.index(each), shrunk.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scale = row_scales.index(PER * RANK // 4 + each).permute((1, 0)).load(LAYOUT)
        factor = gl.where(place == start + each, factors.slice(0, WIDE).load(gl.SliceLayout(0, LAYOUT)), 0.0)
        product = warpgroup_mma_wait(0, deps=(product,))
        total += gl.where((factor > 0.0)[None, :], product.to(gl.float32) * scale * factor[None, :], 0.0)
    cta_barrier()  # the scales were read by every warp
    mbarrier.arrive(slots[2].index(slot), count=1)
    return total, used + 1


@gluon.jit
def expand(
    slots, used, shrunk, factors, first, second, groups, group, level, first_token, PAIR: gl.constexpr,
    RANK: gl.constexpr, OWN: gl.constexpr, WIDE: gl.constexpr, SLOTS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds B times the ranks' activations to `first` [128, WIDE], with PAIR to `second` too -> (first, second, used).

    The tokens are those of list `group`, a list of all tokens (level 0), of a half (1) or of a quarter (2), and begin
    at `first_token`.
    """
    PER: gl.constexpr = adapters_per_slot(RANK)
    own = gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))
    place = gl.load(groups + POSITIONS + level * 64 + first_token + own, mask=own < OWN, other=-1)
    count = gl.load(groups + COUNTS + group)
    for start in range(0, count, PER):
        first, used = _expand_slot(
            slots,
            used,
            shrunk.index(0).slice(0, WIDE, dim=0),
            factors.index(0),
            first,
            place,
            start,
            RANK,
            WIDE,
            SLOTS,
            LAYOUT,
        )
        if PAIR:
            second, used = _expand_slot(
                slots, used, shrunk.index(1), factors.index(1), second, place, start, RANK, WIDE, SLOTS, LAYOUT
            )
    return first, second, used


@gluon.jit
def own_columns(delta, OWN: gl.constexpr, WIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """[128, WIDE] whose columns past OWN are zero -> [128, OWN]."""
    if WIDE > OWN:
        delta = gl.sum(delta.reshape([128, WIDE // OWN, OWN]), axis=1)
    return gl.convert_layout(delta, LAYOUT)
