"""The end of prefill_gluon with splits: the last split of a tile merges all of them; parts of prefixes are stored."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.gluon_support import cta_barrier
from .decode_gluon_softmax import LOWEST


@gluon.jit
def exchange_splits(
    o, lse, planes, split, head, WHO: gl.constexpr, HK: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return (rows [ROWS, 128], whether to store them) of a tile's half for o of one split and its log2-sum-exp [ROWS].

    planes   (partial [.., 128] fp32, logsumexp fp32, arrivals int32 zeros), with ROWS rows per split, KV head and half
    split    as `find_tile` returns it

    A tile that is not split keeps its rows. Otherwise each split stores its rows, and the last one to arrive merges all
    of them in ascending order, so results are bitwise repeatable.
    """
    partial, logsumexp, arrivals = planes
    place, own, splits = split
    is_last = splits == 1
    if splits > 1:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        offsets = (row * 128)[:, None] + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))[None, :]
        tile = (place * HK + head) * 2 + WHO
        gl.store(partial + (tile + own * (HK * 2)) * (ROWS * 128) + offsets, o)
        gl.store(logsumexp + (tile + own * (HK * 2)) * ROWS + row, lse)
        cta_barrier()  # all threads of the group have written before the arrival is counted
        is_last = gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == splits - 1
        if is_last:
            gl.store(arrivals + tile, 0)
            top = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, LAYOUT))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
            o = gl.zeros([ROWS, 128], gl.float32, LAYOUT)
            for i in range(splits):
                at = tile + i * (HK * 2)
                part_lse = gl.load(logsumexp + at * ROWS + row, cache_modifier=".cg")
                part = gl.load(partial + at * (ROWS * 128) + offsets, cache_modifier=".cg")
                new_top = gl.maximum(top, part_lse)
                keep = gl.exp2(top - new_top)
                weight = gl.exp2(part_lse - new_top)
                total = total * keep + weight
                o = o * keep[:, None] + part * weight[:, None]
                top = new_top
            o = o / total[:, None]
    return o, is_last


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
