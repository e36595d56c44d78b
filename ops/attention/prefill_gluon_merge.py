"""The end of prefill_gluon with splits: splits of a tile are merged in a tree; parts of prefixes are stored."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.gluon_support import cta_barrier


@gluon.jit
def exchange_splits(
    o, lse, planes, split, head, WHO: gl.constexpr, HK: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return (rows [ROWS, 128], whether to store them) of a tile's half for o of one split and its log2-sum-exp [ROWS].

    planes   (partial [.., 128] fp32, logsumexp fp32, arrivals int32 zeros), with ROWS rows per split, KV head and half
    split    as `find_tile` returns it

    Splits are merged in pairs, pairs in fours and so on; who arrives second merges both, and goes on. No program waits
    for another, and the order of the sums is fixed, so results are bitwise repeatable.
    """
    partial, logsumexp, arrivals = planes
    place, first, splits = split
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    offsets = (row * 128)[:, None] + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))[None, :]
    tile = (place * HK + head) * 2 + WHO
    width = 1  # o has splits first..first + width
    goes_on = splits > 0
    while goes_on & (width < splits):
        left = first // (2 * width) * (2 * width)
        right = left + width
        if right < splits:
            at = tile + first * (HK * 2)
            gl.store(partial + at * (ROWS * 128) + offsets, o)
            gl.store(logsumexp + at * ROWS + row, lse)
            cta_barrier()  # all threads of the group have written before the arrival is counted
            arrived = arrivals + (tile + right * (HK * 2))
            goes_on = gl.atomic_add(arrived, 1, sem="acq_rel") == 1
            if goes_on:
                gl.store(arrived, 0)
                at = tile + (left + right - first) * (HK * 2)
                other_lse = gl.load(logsumexp + at * ROWS + row, cache_modifier=".cg")
                other = gl.load(partial + at * (ROWS * 128) + offsets, cache_modifier=".cg")
                top = gl.maximum(lse, other_lse)
                own_weight = gl.exp2(lse - top)
                other_weight = gl.exp2(other_lse - top)
                total = own_weight + other_weight
                # the same order of both products for either split
                is_left = first == left
                a = gl.where(is_left, o, other) * (gl.where(is_left, own_weight, other_weight) / total)[:, None]
                b = gl.where(is_left, other, o) * (gl.where(is_left, other_weight, own_weight) / total)[:, None]
                o = a + b
                lse = top + gl.log2(total)
        first = left
        width *= 2
    return o, goes_on


@gluon.jit
def store_part(
    o, lse, planes, part, own, end, head, sequences, HK: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store o [ROWS, 128] and its log2-sum-exp of a part of a prefix, rows own..end of all sequences and heads.

    planes: partial [parts, sequences, HK * GROUP, 128] and logsumexp without the last dimension, fp32.
    """
    partial, logsumexp, _arrivals = planes
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    first = ((part * sequences + own) * HK + head) * GROUP
    place = row // GROUP * (HK * GROUP) + row % GROUP
    is_query = own + row // GROUP < end
    gl.store(
        partial + first * 128 + ((place * 128)[:, None] + dim[None, :]),
        o,
        mask=is_query[:, None] & (dim < 128)[None, :],
    )
    gl.store(logsumexp + first + place, lse, mask=is_query)
