"""The end of decode_gluon: merge warps, shared pages and the splits of a sequence, store rows in 16 or 8 bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.gluon_support import cta_barrier
from .decode_gluon_softmax import LOWEST, PROBABILITY_SHIFT, merge_layout, places


@gluon.jit
def merge_warps(
    acc, top, total, outputs, states, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr,
    BF16: gl.constexpr,
):  # fmt: skip
    """Merge the warps' (maximum, sum, O^T) through shared memory; return (O, log2-sum-exp).

    O [COLUMNS, 128] is divided by the sum; log2-sum-exp is [COLUMNS]. A row that sees no token has zero and LOWEST.
    """
    LAYOUT: gl.constexpr = merge_layout(WARPS)
    BY_HEAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT))
    if BF16:
        o = gl.permute(gl.reshape(acc, [WARPS, 2, 4, 2, 8, COLUMNS]), (0, 5, 1, 4, 2, 3))
    else:
        o = gl.permute(gl.reshape(acc, [WARPS, 8, 2, 8, COLUMNS]), (0, 4, 3, 1, 2))
    outputs.store(gl.reshape(o, [WARPS, COLUMNS, 128]))
    states.index(0).store(top)
    states.index(1).store(gl.sum(total, 1))
    cta_barrier()
    tops = states.index(0).load(gl.SliceLayout(2, LAYOUT))
    new_top = gl.max(tops, 0)
    weight = gl.exp2(tops - new_top[None, :])
    total = gl.convert_layout(
        gl.sum(states.index(1).load(gl.SliceLayout(2, LAYOUT)) * weight, 0), BY_HEAD, assert_trivial=True
    )
    if ROWS > 1:  # a row may see no token of a split
        total = gl.where(total > 0.0, total, 1.0)
    o = gl.sum(outputs.load(LAYOUT) * weight[:, :, None], 0) / total[:, None]
    return o, gl.convert_layout(new_top, BY_HEAD, assert_trivial=True) + gl.log2(total)


@gluon.jit
def column_range(WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Return 0..WIDTH in the layout of O's rows."""
    return gl.arange(0, WIDTH, gl.SliceLayout(1, gl.SliceLayout(0, merge_layout(WARPS))))


@gluon.jit
def store_rows(out, place, o, USED: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Store the first USED of o's WIDTH rows, [.., 128], to rows `place` of `out`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, merge_layout(WARPS))
    dim = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    gl.store(
        out + place[:, None] * 128 + dim[None, :],
        o.to(out.dtype.element_ty),
        mask=(column_range(WIDTH, WARPS) < USED)[:, None] & (dim < 128)[None, :],
    )


@gluon.jit
def store_result(
    out, head_scales, rows, sequence, tokens, is_last, o, G: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr,
    USED: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, PADDED: gl.constexpr, EMPTY: gl.constexpr = False,
):  # fmt: skip
    """Store o at the columns' `places`; with PADDED in e4m3 or int8, with one scale per row at head_scales [G, PADDED].

    The last program of a head writes zero scales past all `tokens`. EMPTY: o is zero, and its bytes are stored as
    integers, because ptxas of Triton 3.6 miscompiles packed conversions of a constant.
    """
    column = column_range(WIDTH, WARPS)
    row, head = places(column, rows, G, HEADS, ROWS)
    place = row + head
    if PADDED:
        LAYOUT: gl.constexpr = gl.SliceLayout(0, merge_layout(WARPS))
        o = o.to(gl.bfloat16).to(gl.float32)  # same rounding as an op that quantizes 16-bit rows
        WHOLE: gl.constexpr = out.dtype.element_ty == gl.int8
        step = gl.maximum(gl.max(gl.abs(o), 1), 1e-12) / (127.0 if WHOLE else 448.0)
        token = sequence if ROWS == 1 else row // HEADS
        gl.store(head_scales + head * PADDED + token, step, mask=column < USED)
        if EMPTY:
            nothing = gl.zeros([WIDTH, 128], gl.int8, LAYOUT)
            store_rows(out.to(gl.pointer_type(gl.int8), bitcast=True), place, nothing, USED, WIDTH, WARPS)
        elif WHOLE:
            # round to the nearest integer
            store_rows(out, place, (o / step[:, None] + 12582912.0) - 12582912.0, USED, WIDTH, WARPS)
        else:
            store_rows(out, place, o / step[:, None], USED, WIDTH, WARPS)
        if is_last:
            after = gl.arange(0, PADDED, gl.BlockedLayout([1], [32], [WARPS], [0]))
            for i in gl.static_range(G):
                gl.store(head_scales + i * PADDED + after, gl.zeros_like(after).to(gl.float32), mask=after >= tokens)
    else:
        store_rows(out, place, o, USED, WIDTH, WARPS)


@gluon.jit
def merge_splits(
    partial, logsumexp, row, active, USED: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr, STEP: gl.constexpr
):
    """Merge splits row..row + active, [USED, 128] each, in ascending order, STEP at a time -> [GROUP, 128]."""
    LAYOUT: gl.constexpr = merge_layout(WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    BY_HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    head = gl.arange(0, GROUP, BY_HEAD)
    dim = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    split = gl.arange(0, STEP, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    top = gl.full([GROUP], LOWEST, gl.float32, BY_HEAD)
    total = gl.zeros([GROUP], gl.float32, BY_HEAD)
    merged = gl.zeros([GROUP, 128], gl.float32, ROWS)
    for first in range(0, active, STEP):
        at = (row + first + split)[:, None] * USED + head[None, :]
        there = (first + split < active)[:, None] & (head < USED)[None, :]
        lse = gl.load(logsumexp + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        part = gl.load(
            partial + at[:, :, None] * 128 + dim[None, None, :], mask=there[:, :, None], other=0.0, cache_modifier=".cg"
        )
        new_top = gl.maximum(top, gl.max(lse, 0))
        keep = gl.exp2(top - new_top)
        weight = gl.exp2(lse - new_top[None, :])
        total = total * keep + gl.sum(weight, 0)
        merged = merged * gl.convert_layout(keep, gl.SliceLayout(1, ROWS), assert_trivial=True)[:, None] + gl.sum(
            part * weight[:, :, None], 0
        )
        top = new_top
    return merged / gl.convert_layout(total, gl.SliceLayout(1, ROWS), assert_trivial=True)[:, None]


@gluon.jit
def load_prefix(
    prefix, prefix_lse, count, first_row, rows, USED: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr
):
    """Return (sum of O, sum of weights, top) of `count` parts of a prefix; without parts (zeros, zeros, LOWEST).

    The weights are relative to 2^top. prefix [parts, rows, 128] and prefix_lse [parts, rows] fp32, from
    `prefix_attention`; the columns are rows from first_row on.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(0, merge_layout(WARPS))
    column = column_range(WIDTH, WARPS)
    dim = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    offsets = (column * 128)[:, None] + dim[None, :]
    used = (column < USED)[:, None] & (dim < 128)[None, :]
    top = gl.full([WIDTH], LOWEST, gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(1, LAYOUT))
    o = gl.zeros([WIDTH, 128], gl.float32, LAYOUT)
    next_lse = gl.load(prefix_lse + first_row + column, mask=(column < USED) & (count > 0), other=LOWEST)
    next_part = gl.load(prefix + first_row * 128 + offsets, mask=used & (count > 0), other=0.0)
    for i in range(count):
        # lse is that of probabilities times 2^PROBABILITY_SHIFT
        part_lse, part = next_lse + PROBABILITY_SHIFT, next_part
        at = (i + 1) * rows + first_row
        left = i + 1 < count
        next_lse = gl.load(prefix_lse + at + column, mask=(column < USED) & left, other=LOWEST)
        next_part = gl.load(prefix + at * 128 + offsets, mask=used & left, other=0.0)
        new_top = gl.maximum(top, part_lse)
        keep = gl.exp2(top - new_top)
        weight = gl.exp2(part_lse - new_top)
        total = total * keep + weight
        o = o * keep[:, None] + part * weight[:, None]
        top = new_top
    return o, total, top


@gluon.jit
def merge_prefix(o, lse, prefix):
    """Merge o [WIDTH, 128] and its log2-sum-exp with the result of `load_prefix`; return both."""
    prefix_o, prefix_total, prefix_top = prefix
    top = gl.maximum(lse, prefix_top)
    keep = gl.exp2(lse - top)
    weight = gl.exp2(prefix_top - top)
    total = keep + prefix_total * weight
    return (o * keep[:, None] + prefix_o * weight[:, None]) / total[:, None], top + gl.log2(total)
