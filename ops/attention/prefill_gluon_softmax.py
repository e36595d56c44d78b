"""Functions of prefill_gluon and prefill_wide_gluon: layouts, conversion to fp16, softmax, consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..core.gluon_support import gdc_wait, tma_load
from .decode_gluon_softmax import LOWEST
from .prefill_gluon_merge import exchange_splits, store_part
from .prefill_gluon_tiles import PREFIXES, ROWS, SPLIT_TILES, STEP, find_tile, item_of, rounds
from .widen_kv import WIDEN_INT8, WIDENED


@gluon.constexpr_function
def score_layout(FP8):
    """Return the layout of the scores [64 rows, 128 keys] of a group of four warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32 if FP8 else 16])


@gluon.constexpr_function
def output_layout():
    """Return the layout of the output [64 rows, 128 dims] of a group of four warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])


@gluon.constexpr_function
def converter_layout(WARPS):
    """Return the layout [32 tokens, 128 dims] of the converters, without bank conflicts.

    Half a warp reads 8 values per lane from tokens 0 and 4, a quarter writes 128 bytes of one token.
    """
    rows = [[2, 0], [8, 0], [16, 0]]
    own = 3 - (WARPS.bit_length() - 1)
    lanes = [[0, 8], [0, 16], [0, 32], [4, 0], [1, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 64], *rows[3 - own :]], lanes, rows[: 3 - own], [], [32, 128]
    )


@gluon.jit
def tile_rows(first_token, end, head, LAYOUT: gl.constexpr, HK: gl.constexpr, GROUP: gl.constexpr):
    """Return the offsets of a group's 64 rows in q or out from the first one, and which rows exist."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    offsets = ((row // GROUP * (HK * GROUP) + row % GROUP) * 128)[:, None] + dim[None, :]
    return offsets, (first_token + row // GROUP < end)[:, None] & (dim < 128)[None, :]


@gluon.jit
def store_tile(out, acc, staged, first_token, end, head, LAYOUT: gl.constexpr, HK: gl.constexpr, GROUP: gl.constexpr):
    """Store a group's rows that exist, through shared memory."""
    staged.store(acc.to(out.dtype.element_ty))
    offsets, is_query = tile_rows(first_token, end, head, LAYOUT, HK, GROUP)
    gl.store(out + offsets, staged.load(LAYOUT), mask=is_query)


@gluon.jit
def fetch(boxes, ring, ready, slot, first_row, second_row):
    """Load K or V of two pages to stage `slot`: boxes of 64 rows and 128 bytes each."""
    tma_load(boxes, [first_row, 0], ready, ring.index(slot * 2))
    tma_load(boxes, [second_row, 0], ready, ring.index(slot * 2 + 1))


@gluon.jit
def widen(x, scale):
    """Convert four adjacent e4m3 or int8 values to fp16, times their row's scale (two equal fp16 in 32 bits)."""
    if x.dtype == gl.int8:
        return gl.inline_asm_elementwise(
            WIDEN_INT8, "=r,=r,r,r,r,r,r", [x, scale], dtype=gl.float16, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 a, b; .reg .b16 low, high;
                 mov.b32 {low, high}, $2;
                 cvt.rn.f16x2.e4m3x2 a, low;
                 cvt.rn.f16x2.e4m3x2 b, high;
                 mul.rn.f16x2 $0, a, $3;
                 mul.rn.f16x2 $1, b, $3; }""",
            "=r,=r,r,r,r,r,r",
            [x, scale],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )


@gluon.jit
def pack(p):
    """Pack fp32 [64, 128] as pairs of fp16 in 32 bits [64, 64]; separate fp16 values would use a register each."""
    even, odd = gl.split(gl.reshape(p, [ROWS, STEP // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(pairs):
    """Unpack `pack`'s result as the left operand of P V."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p = gl.reshape(gl.join(even, odd), [ROWS, STEP]).to(gl.float16, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, output_layout(), 2), assert_trivial=True)


@gluon.jit
def weigh(
    scores, key_scales, slot, factor, top, total, first_key, position, FP8_SCORES: gl.constexpr, MASK: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Apply one step of the online softmax.

    Return (packed probabilities, factor of the older sums, new maximum, new sum). Maxima are those of scores before
    they are multiplied by `factor`.
    """
    SCORES: gl.constexpr = score_layout(FP8_SCORES)
    if FP8_SCORES:
        scores = scores * key_scales.index(slot).load(gl.SliceLayout(0, SCORES))[None, :]
    if MASK:
        key = gl.arange(0, STEP, gl.SliceLayout(0, SCORES))
        seen = key[None, :] <= (position - first_key)[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > (position - first_key - WINDOW)[:, None])
        scores = gl.where(seen, scores, -float("inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    keep = gl.exp2((top - new_top) * factor)
    p = gl.exp2(scores * factor[:, None] - (new_top * factor)[:, None])
    return pack(p), keep, new_top, total * keep + gl.sum(p, 1)


@gluon.jit
def attend(
    begin, stop, base, steps, q, factor, position, top, total, acc, p, keys, key_scales, keys_ready, keys_free, values,
    values_ready, values_free, turns, WHO: gl.constexpr, FP8_SCORES: gl.constexpr, MASK: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Run steps begin..stop: multiply the previous step's probabilities by its values during this step's softmax."""
    SCORES: gl.constexpr = score_layout(FP8_SCORES)
    OUTPUT: gl.constexpr = output_layout()
    nothing = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    for j in range(begin, stop):
        step = base + j
        slot = step % STAGES
        before = (step - 1) % STAGES
        if FP8_SCORES:
            mbarrier.wait(keys_ready.index(slot), step // STAGES & 1)
        if TURNS:
            wait_turn(turns, step, WHO)
        scores = warpgroup_mma(q, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(values_ready.index(before), (step - 1) // STAGES & 1)
        product = warpgroup_mma(unpack(p), values.index(before), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - WHO), count=1)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p, keep, top, total = weigh(
            scores, key_scales, slot, factor, top, total, (steps - 1 - j) * STEP, position, FP8_SCORES, MASK,
            WINDOW,
        )  # fmt: skip
        if FP8_SCORES:
            fence_async_shared()  # scales have been read: a barrier does not complete loads
        mbarrier.arrive(keys_free.index(slot), count=1)
        if not FP8_SCORES:
            # Wait for the next step's keys here: ptxas would move the softmax behind the wait for the product, so that
            # they do not overlap, but it moves nothing across a spin loop. (With queries in registers too, as in e4m3,
            # both at the same time need too many registers.)
            mbarrier.wait(keys_ready.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=j + 1 < steps)
        acc = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(values_free.index(before), count=1)
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, OUTPUT))[:, None]
    return top, total, acc, p


@gluon.jit
def wait_turn(turns, step, WHO: gl.constexpr):
    """Wait until the other group has issued its products of a step: one group multiplies during the other's softmax.

    Group 0 starts.
    """
    mbarrier.wait(turns.index(WHO), (step & 1) ^ (1 - WHO))


@gluon.jit
def consume(
    q, out, batch, scale_log2, queries, staged, keys, key_scales, keys_ready, keys_free, values, values_ready,
    values_free, turns, WHO: gl.constexpr, HK: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr,
    PLANNED: gl.constexpr, FP8_SCORES: gl.constexpr, HOLD_QUERIES: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, WINDOW: gl.constexpr = 0, SPLIT: gl.constexpr = 0, planes=None,
):  # fmt: skip
    """Compute 64 rows (consumer warps): group WHO of the two.

    HOLD_QUERIES: keep 16-bit queries in registers too. TURNS: the groups alternate on the tensor cores. SPLIT as
    in `find_tile`; `planes` is the memory of `exchange_splits` or `store_part`.
    """
    SCORES: gl.constexpr = score_layout(FP8_SCORES)
    OUTPUT: gl.constexpr = output_layout()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 4 if FP8_SCORES else 2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if SPLIT == PREFIXES:
        gdc_wait()
    base = 0
    items, count = rounds(batch, HK)
    for number in range(count):
        item = item_of(number)
        if item < items:
            head, _sequence, first_token, end, position, _length, steps, whole, _skipped, split = find_tile(
                item, batch, HK, TILE, PLANNED, 4, WINDOW, SPLIT
            )
            own = first_token + WHO * (TILE // 2)
            at = (own.to(gl.int64) * HK + head) * (GROUP * 128)
            if own < end:
                if steps > 0:
                    factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES)) * scale_log2
                    LOADED: gl.constexpr = OPERAND if FP8_SCORES else STORE
                    offsets, is_query = tile_rows(own, end, head, LOADED, HK, GROUP)
                    operand = gl.load(q + at + offsets, mask=is_query, other=0.0)
                    if FP8_SCORES:
                        wide = operand.to(gl.float32)
                        scale = gl.maximum(gl.max(gl.abs(wide), 1), 1e-12) / 448.0
                        operand = (wide * (1.0 / scale)[:, None]).to(gl.float8e4nv)
                        factor = factor * gl.convert_layout(scale, gl.SliceLayout(1, SCORES))
                    else:
                        queries.index(WHO).store(operand.to(gl.float16))
                        factor = factor * (1.0 / WIDENED)
                        if HOLD_QUERIES:
                            operand = queries.index(WHO).load(OPERAND)
                        else:
                            fence_async_shared()
                            operand = queries.index(WHO)
                    here = position + WHO * (TILE // 2) + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) // GROUP
                    top = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
                    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
                    acc = gl.zeros([ROWS, 128], gl.float32, OUTPUT)
                    slot = base % STAGES
                    mbarrier.wait(keys_ready.index(slot), base // STAGES & 1)
                    if TURNS:
                        wait_turn(turns, base, WHO)
                    scores = warpgroup_mma(
                        operand,
                        keys.index(slot).permute((1, 0)),
                        gl.zeros([ROWS, STEP], gl.float32, SCORES),
                        use_acc=False,
                        is_async=True,
                    )
                    if TURNS:
                        mbarrier.arrive(turns.index(1 - WHO), count=1)
                    scores = warpgroup_mma_wait(0, deps=(scores,))
                    p, _keep, top, total = weigh(
                        scores, key_scales, slot, factor, top, total, (steps - 1) * STEP, here, FP8_SCORES, True,
                        WINDOW,
                    )  # fmt: skip
                    if FP8_SCORES:
                        fence_async_shared()
                    mbarrier.arrive(keys_free.index(slot), count=1)
                    if not FP8_SCORES:
                        mbarrier.wait(keys_ready.index((base + 1) % STAGES), (base + 1) // STAGES & 1, pred=steps > 1)
                    masked = gl.maximum(steps - whole, 1)
                    top, total, acc, p = attend(
                        1, masked, base, steps, operand, factor, here, top, total, acc, p, keys, key_scales, keys_ready,
                        keys_free, values, values_ready, values_free, turns, WHO, FP8_SCORES, True, WINDOW, STAGES,
                        TURNS,
                    )  # fmt: skip
                    unclipped = steps
                    if WINDOW:  # not every row sees the start of the oldest steps
                        clipped = (gl.maximum(position + TILE - WINDOW, 0) + STEP - 1) // STEP
                        unclipped = gl.maximum(steps - clipped, masked)
                    top, total, acc, p = attend(
                        masked, unclipped, base, steps, operand, factor, here, top, total, acc, p, keys, key_scales,
                        keys_ready, keys_free, values, values_ready, values_free, turns, WHO, FP8_SCORES, False, 0,
                        STAGES, TURNS,
                    )  # fmt: skip
                    if WINDOW:
                        top, total, acc, p = attend(
                            unclipped, steps, base, steps, operand, factor, here, top, total, acc, p, keys, key_scales,
                            keys_ready, keys_free, values, values_ready, values_free, turns, WHO, FP8_SCORES, True,
                            WINDOW, STAGES, TURNS,
                        )  # fmt: skip
                    newest = base + steps - 1
                    slot = newest % STAGES
                    mbarrier.wait(values_ready.index(slot), newest // STAGES & 1)
                    product = warpgroup_mma(unpack(p), values.index(slot), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=(product,))
                    mbarrier.arrive(values_free.index(slot), count=1)
                    if SPLIT:
                        total = gl.where(total > 0.0, total, 1.0)  # a row may see no key of a split
                        lse = gl.convert_layout(top * factor + gl.log2(total), gl.SliceLayout(1, OUTPUT))
                    share = 1.0 / gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))
                    share = share * (1.0 / WIDENED)
                    acc = acc * share[:, None]
                    if SPLIT == PREFIXES:
                        store_part(acc, lse, planes, split[0], own, end, head, batch[4], HK, GROUP, ROWS, OUTPUT)
                    elif SPLIT == SPLIT_TILES:
                        acc, is_whole = exchange_splits(acc, lse, planes, split, head, WHO, HK, ROWS, OUTPUT)
                        if is_whole:
                            store_tile(out + at, acc, staged.index(WHO), own, end, head, STORE, HK, GROUP)
                    else:
                        store_tile(out + at, acc, staged.index(WHO), own, end, head, STORE, HK, GROUP)
                else:
                    place, is_row = tile_rows(own, end, head, STORE, HK, GROUP)
                    gl.store(out + at + place, gl.zeros([ROWS, 128], out.dtype.element_ty, STORE), mask=is_row)
            else:
                for j in range(steps):  # the other group's pages
                    step = base + j
                    slot = step % STAGES
                    mbarrier.wait(keys_ready.index(slot), step // STAGES & 1)
                    if TURNS:
                        wait_turn(turns, step, WHO)
                        mbarrier.arrive(turns.index(1 - WHO), count=1)
                    mbarrier.arrive(keys_free.index(slot), count=1)
                    mbarrier.wait(values_ready.index(slot), step // STAGES & 1)
                    mbarrier.arrive(values_free.index(slot), count=1)
            base += steps
