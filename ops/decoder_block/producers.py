"""The two loading warps of a decoder block's CTA, and the counters on which CTAs wait.

One warp streams weights and never waits for other CTAs; the other loads activations after other CTAs have stored them.
`kernel.py` describes the counters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..core.gluon_support import gdc_launch_dependents, gdc_wait, tma_load

SPLIT = gl.constexpr(4)  # CTAs that share a tile of o or down
BOX_BYTES = gl.constexpr(128 * 128)  # a weight slot: 128 rows of 128 columns
# Offsets of counters; those that many CTAs poll are 128 bytes apart.
O_DONE = gl.constexpr(0)
DOWN_DONE = gl.constexpr(32)
GATE_UP_DONE = gl.constexpr(64)
PLANES_O = gl.constexpr(192)
PLANES_DOWN = gl.constexpr(320)
PLANES_QKV = gl.constexpr(448)
COUNTERS = 704


@gluon.jit
def fence_before_tma(x):
    """Make other CTAs' plain stores that this thread has observed visible to its TMA reads."""
    gl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_count(counter, goal):
    """Wait until a counter in global memory has reached `goal`; stores before its increments are visible then."""
    while gl.atomic_add(counter, 0, sem="acquire") < goal:
        pass


@gluon.jit
def clear(counters, FIRST: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Zero COUNT (a power of two) counters from FIRST on; WARPS: number of calling warps."""
    place = gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.store(counters + FIRST + place, gl.zeros_like(place))


@gluon.jit
def stream(
    boxes, ring, ready, empty, filled, row, pair_row, column, count, PAIR: gl.constexpr, SLOTS: gl.constexpr,
    DEPTH: gl.constexpr, EARLY_DEPTH: gl.constexpr,
):  # fmt: skip
    """Load `count` slots of one matrix to the ring, at most DEPTH in flight.

    EARLY_DEPTH applies during the product with the previous matrix. With PAIR a step is two slots: 128 gate rows, then
    the 128 up rows of the same columns.
    """
    for i in range(count):
        slot = filled % SLOTS
        landed = filled - gl.where(i < SLOTS, EARLY_DEPTH, DEPTH)
        if landed >= 0:
            mbarrier.wait(ready.index(landed % SLOTS), landed // SLOTS & 1)
        mbarrier.wait(empty.index(slot), filled // SLOTS & 1 ^ 1)
        mbarrier.expect(ready.index(slot), BOX_BYTES)
        if PAIR:
            tma_load(
                boxes, [gl.where(i % 2 == 1, pair_row, row), column + i // 2 * 128], ready.index(slot), ring.index(slot)
            )
        else:
            tma_load(boxes, [row, column + i * 128], ready.index(slot), ring.index(slot))
        filled += 1
    return filled


@gluon.jit
def stream_weights(
    o_boxes, gate_up_boxes, down_boxes, qkv_boxes, ring, ready, empty, program, STEPS_O: gl.constexpr,
    STEPS_H: gl.constexpr, STEPS_DOWN: gl.constexpr, GATE_TILES: gl.constexpr, QKV_FIRST: gl.constexpr,
    HAS_QKV: gl.constexpr, SLOTS: gl.constexpr, DEPTH: gl.constexpr, EARLY_DEPTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Stream this CTA's part of o, gate_up, down and q/k/v (producer warp); waits for free slots only."""
    if PDL:
        gdc_launch_dependents()
    tile_row = program // SPLIT * 128
    part = program % SPLIT
    filled = 0
    filled = stream(
        o_boxes, ring, ready, empty, filled, tile_row, 0, part * (STEPS_O * 128), STEPS_O, False, SLOTS, DEPTH,
        EARLY_DEPTH,
    )  # fmt: skip
    if program < GATE_TILES:
        up_row = (GATE_TILES + program) * 128
        filled = stream(
            gate_up_boxes, ring, ready, empty, filled, program * 128, up_row, 0, 2 * STEPS_H, True, SLOTS, DEPTH,
            EARLY_DEPTH,
        )  # fmt: skip
    filled = stream(
        down_boxes, ring, ready, empty, filled, tile_row, 0, part * (STEPS_DOWN * 128), STEPS_DOWN, False, SLOTS, DEPTH,
        EARLY_DEPTH,
    )  # fmt: skip
    if HAS_QKV:  # noqa: SIM102  a constant
        if program >= QKV_FIRST:
            share = program - QKV_FIRST
            stream(
                qkv_boxes, ring, ready, empty, filled, share // 2 * 128, 0, share % 2 * (STEPS_H * 64), STEPS_H // 2,
                False, SLOTS, DEPTH, EARLY_DEPTH,
            )  # fmt: skip


@gluon.jit
def bring(
    boxes, scale_boxes, rows, scales, ready, empty, filled, first, count, BLOCK_T: gl.constexpr, PADDED: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Load `count` blocks of 128 columns of an activation, each with its scales."""
    for i in range(count):
        slot = filled % SLOTS
        mbarrier.wait(empty.index(slot), filled // SLOTS & 1 ^ 1)
        mbarrier.expect(ready.index(slot), BLOCK_T * 128 + PADDED * 4)
        tma_load(boxes, [0, (first + i) * 128], ready.index(slot), rows.index(slot))
        tma_load(scale_boxes, [first + i, 0], ready.index(slot), scales.index(slot))
        filled += 1
    return filled


@gluon.jit
def bring_rows(
    o_rows, o_scales, gate_rows, gate_scales, down_rows, down_scales, qkv_rows, qkv_scales, rows, scales, ready, empty,
    counters, program, finishers, STEPS_O: gl.constexpr, STEPS_H: gl.constexpr, STEPS_DOWN: gl.constexpr,
    TILES: gl.constexpr, GATE_TILES: gl.constexpr, QKV_FIRST: gl.constexpr, HAS_QKV: gl.constexpr,
    BLOCK_T: gl.constexpr, PADDED: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load each linear's activations as soon as the counters show that other CTAs have stored them."""
    if PDL:
        gdc_wait()
    part = program % SPLIT
    filled = 0
    filled = bring(
        o_rows, o_scales, rows, scales, ready, empty, filled, part * STEPS_O, STEPS_O, BLOCK_T, PADDED, SLOTS
    )
    await_count(counters + O_DONE, TILES * finishers)
    fence_before_tma(program)
    if program < GATE_TILES:
        filled = bring(gate_rows, gate_scales, rows, scales, ready, empty, filled, 0, STEPS_H, BLOCK_T, PADDED, SLOTS)
    await_count(counters + GATE_UP_DONE + 32 * part, GATE_TILES // SPLIT)
    fence_before_tma(program)
    filled = bring(
        down_rows,
        down_scales,
        rows,
        scales,
        ready,
        empty,
        filled,
        part * STEPS_DOWN,
        STEPS_DOWN,
        BLOCK_T,
        PADDED,
        SLOTS,
    )
    if program >= QKV_FIRST:
        await_count(counters + DOWN_DONE, TILES * finishers)
        if program == QKV_FIRST:
            clear(counters, O_DONE, 2, 1)
            clear(counters, PLANES_O, 128, 1)
        if HAS_QKV:
            fence_before_tma(program)
            half = (program - QKV_FIRST) % 2
            bring(
                qkv_rows, qkv_scales, rows, scales, ready, empty, filled, half * (STEPS_H // 2), STEPS_H // 2, BLOCK_T,
                PADDED, SLOTS,
            )  # fmt: skip
