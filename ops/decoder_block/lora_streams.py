"""The two warps that bring data in a CTA of `decoder_block_lora`: what `decoder_block_streams` does, and the adapters'
rows in the same ring.

A CTA that multiplies base weights gets the B rows of its tile behind each matrix: `PER` adapters a slot, each [128, R]
bytes with its 128 fp32 scales behind them. The four CTAs that shrink get A rows alone: a slot holds 128 / R units, a
unit being one linear's R ranks of one adapter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..core.gluon_support import gdc_launch_dependents, gdc_wait, plain_layout, tma_load, view_shared
from .streams import DOWN_DONE, GATE_UP_DONE, O_DONE, SPLIT, await_count, bring, bring_rows, fence_before_tma, stream

COUNTS = gl.constexpr(10 * 64)  # of lora_groups' result: the lists' lengths
POSITIONS = gl.constexpr(7 * 64)  # places in the list of all tokens, of halves, of quarters


@gluon.constexpr_function
def adapters_per_slot(RANK):
    """B rows of this many adapters and their scales fit a ring slot."""
    return 128 // RANK - 1


@gluon.constexpr_function
def operand_layout(WIDTH):
    """Rows of WIDTH eight-bit values as the tensor core reads them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=WIDTH, element_bitwidth=8, rank=2)


@gluon.jit
def _claim(ring, ready, empty, filled, SLOTS: gl.constexpr, DEPTH: gl.constexpr):
    """Waits until slot `filled` is free and no more than DEPTH are in flight."""
    slot = filled % SLOTS
    if DEPTH < SLOTS:
        landed = filled - DEPTH
        if landed >= 0:
            mbarrier.wait(ready.index(landed % SLOTS), landed // SLOTS & 1)
    mbarrier.wait(empty.index(slot), filled // SLOTS & 1 ^ 1)
    return slot


@gluon.jit
def _stream_b(
    boxes, scale_boxes, ring, ready, empty, filled, groups, group, row, pair_row, STACK: gl.constexpr,
    PAIR: gl.constexpr, RANK: gl.constexpr, SLOTS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """The rows of this tile of every adapter in list `group`; with PAIR a slot of gate rows, then one of up rows.

    STACK: rows of one adapter.
    """
    PER: gl.constexpr = adapters_per_slot(RANK)
    count = gl.load(groups + COUNTS + group)
    SIDES: gl.constexpr = 2 if PAIR else 1
    for i in range((count + PER - 1) // PER * SIDES):
        slot = _claim(ring, ready, empty, filled, SLOTS, DEPTH)
        first = i // SIDES * PER
        present = gl.minimum(count - first, PER)
        for each in gl.static_range(1, PER + 1):
            mbarrier.expect(ready.index(slot), each * (128 * RANK + 512), pred=present == each)
        matrices = view_shared(ring.index(slot), ring.dtype, [128 // RANK, 128, RANK], operand_layout(RANK))
        row_scales = view_shared(ring.index(slot), gl.float32, [32, 1, 128], plain_layout())
        for each in gl.static_range(PER):
            if each < present:
                adapter = gl.load(groups + group * 64 + first + each)
                at = adapter * STACK + gl.where(i % SIDES == 1, pair_row, row)
                tma_load(boxes, [at, 0], ready.index(slot), matrices.index(each))
                tma_load(scale_boxes, [at // 128, 0], ready.index(slot), row_scales.index(PER * RANK // 4 + each))
        filled += 1
    return filled


@gluon.jit
def _stream_a(
    boxes, ring, ready, empty, filled, groups, column, steps, N: gl.constexpr, RANK: gl.constexpr, SLOTS: gl.constexpr
):
    """A rows of all units over `steps` blocks of K: two slots a step, 2 * 128 / RANK units a round."""
    UNITS: gl.constexpr = 128 // RANK
    units = gl.load(groups + COUNTS) * N
    for i in range((units + (2 * UNITS - 1)) // (2 * UNITS) * steps * 2):
        slot = _claim(ring, ready, empty, filled, SLOTS, SLOTS)
        first = (i // (2 * steps) * 2 + i % 2) * UNITS
        present = gl.minimum(units - first, UNITS)
        if present <= 0:
            mbarrier.arrive(ready.index(slot), count=1)
        for each in gl.static_range(1, UNITS + 1):
            mbarrier.expect(ready.index(slot), each * (128 * RANK), pred=present == each)
        parts = view_shared(ring.index(slot), ring.dtype, [UNITS, RANK, 128], operand_layout(128))
        for each in gl.static_range(UNITS):
            if each < present:
                unit = first + each
                adapter = gl.load(groups + unit // N)
                tma_load(
                    boxes,
                    [(adapter * N + unit % N) * RANK, column + i // 2 % steps * 128],
                    ready.index(slot),
                    parts.index(each),
                )
        filled += 1
    return filled


@gluon.jit
def stream_lora_weights(
    o_boxes, gate_up_boxes, down_boxes, qkv_boxes, a_boxes, b_boxes, b_scale_boxes, ring, ready, empty, groups, program,
    STEPS_O: gl.constexpr, STEPS_H: gl.constexpr, STEPS_DOWN: gl.constexpr, TILES: gl.constexpr,
    GATE_TILES: gl.constexpr, QKV_WIDTH: gl.constexpr, QKV_FIRST: gl.constexpr, LINEARS: gl.constexpr,
    RANK: gl.constexpr, SLOTS: gl.constexpr, DEPTH: gl.constexpr, EARLY_DEPTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp. LINEARS: how many linears with LoRA are packed in o, gate_up, down and q/k/v (0: none has it).

    The list of adapters is another kernel's result, so it is read behind the PDL wait; o's weights are on their way by
    then.
    """
    if PDL:
        gdc_launch_dependents()
    filled = 0
    if program >= TILES * SPLIT:
        share = program - TILES * SPLIT
        if PDL:
            gdc_wait()
        if LINEARS[0]:
            filled = _stream_a(
                a_boxes[0],
                ring,
                ready,
                empty,
                filled,
                groups,
                share * (STEPS_O * 128),
                STEPS_O,
                LINEARS[0],
                RANK,
                SLOTS,
            )
        if LINEARS[1]:
            filled = _stream_a(
                a_boxes[1],
                ring,
                ready,
                empty,
                filled,
                groups,
                share * (STEPS_H * 32),
                STEPS_H // 4,
                LINEARS[1],
                RANK,
                SLOTS,
            )
        if LINEARS[2]:
            filled = _stream_a(
                a_boxes[2],
                ring,
                ready,
                empty,
                filled,
                groups,
                share * (STEPS_DOWN * 128),
                STEPS_DOWN,
                LINEARS[2],
                RANK,
                SLOTS,
            )
        if LINEARS[3]:
            _stream_a(
                a_boxes[3],
                ring,
                ready,
                empty,
                filled,
                groups,
                share * (STEPS_H * 32),
                STEPS_H // 4,
                LINEARS[3],
                RANK,
                SLOTS,
            )
    else:
        row = program // SPLIT * 128
        part = program % SPLIT
        filled = stream(
            o_boxes, ring, ready, empty, filled, row, 0, part * (STEPS_O * 128), STEPS_O, False, SLOTS, DEPTH,
            EARLY_DEPTH,
        )  # fmt: skip
        if PDL:
            gdc_wait()
        if LINEARS[0]:
            filled = _stream_b(
                b_boxes[0], b_scale_boxes[0], ring, ready, empty, filled, groups, 3 + part, row, 0, TILES * 128, False,
                RANK, SLOTS, DEPTH,
            )  # fmt: skip
        if program < GATE_TILES:
            up_row = (GATE_TILES + program) * 128
            filled = stream(
                gate_up_boxes, ring, ready, empty, filled, program * 128, up_row, 0, 2 * STEPS_H, True, SLOTS, DEPTH,
                EARLY_DEPTH,
            )  # fmt: skip
            if LINEARS[1]:
                filled = _stream_b(
                    b_boxes[1], b_scale_boxes[1], ring, ready, empty, filled, groups, 0, program * 128, up_row,
                    GATE_TILES * 256, True, RANK, SLOTS, DEPTH,
                )  # fmt: skip
        filled = stream(
            down_boxes, ring, ready, empty, filled, row, 0, part * (STEPS_DOWN * 128), STEPS_DOWN, False, SLOTS, DEPTH,
            EARLY_DEPTH,
        )  # fmt: skip
        if LINEARS[2]:
            filled = _stream_b(
                b_boxes[2], b_scale_boxes[2], ring, ready, empty, filled, groups, 3 + part, row, 0, TILES * 128, False,
                RANK, SLOTS, DEPTH,
            )  # fmt: skip
        if QKV_WIDTH:  # noqa: SIM102  a constant
            if program >= QKV_FIRST:
                tile = (program - QKV_FIRST) // 2
                half = (program - QKV_FIRST) % 2
                filled = stream(
                    qkv_boxes, ring, ready, empty, filled, tile * 128, 0, half * (STEPS_H * 64), STEPS_H // 2, False,
                    SLOTS, DEPTH, EARLY_DEPTH,
                )  # fmt: skip
                if LINEARS[3]:
                    _stream_b(
                        b_boxes[3], b_scale_boxes[3], ring, ready, empty, filled, groups, 1 + half, tile * 128, 0,
                        QKV_WIDTH, False, RANK, SLOTS, DEPTH,
                    )  # fmt: skip


@gluon.jit
def _bring_again(
    boxes, scale_boxes, rows, scales, ready, empty, filled, groups, first, count, N: gl.constexpr, RANK: gl.constexpr,
    BLOCK_T: gl.constexpr, PADDED: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The same blocks for each round of `_stream_a`."""
    units = gl.load(groups + COUNTS) * N
    for _ in range((units + (256 // RANK - 1)) // (256 // RANK)):
        filled = bring(boxes, scale_boxes, rows, scales, ready, empty, filled, first, count, BLOCK_T, PADDED, SLOTS)
    return filled


@gluon.jit
def bring_lora_rows(
    inputs, rows, scales, ready, empty, counters, groups, program, finishers, STEPS_O: gl.constexpr,
    STEPS_H: gl.constexpr, STEPS_DOWN: gl.constexpr, TILES: gl.constexpr, GATE_TILES: gl.constexpr,
    QKV_FIRST: gl.constexpr, HAS_QKV: gl.constexpr, LINEARS: gl.constexpr, RANK: gl.constexpr, BLOCK_T: gl.constexpr,
    PADDED: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warp that brings activations; a CTA that shrinks gets a quarter of each linear's."""
    if program >= TILES * SPLIT:
        share = program - TILES * SPLIT
        if PDL:
            gdc_wait()
        filled = 0
        if LINEARS[0]:
            filled = _bring_again(
                inputs[0], inputs[1], rows, scales, ready, empty, filled, groups, share * STEPS_O, STEPS_O, LINEARS[0],
                RANK, BLOCK_T, PADDED, SLOTS,
            )  # fmt: skip
        await_count(counters + O_DONE, TILES * finishers)
        gl.atomic_add(counters + DOWN_DONE, 1, sem="release")  # O_DONE may be cleared for the next launch
        fence_before_tma(program)
        if LINEARS[1]:
            filled = _bring_again(
                inputs[2], inputs[3], rows, scales, ready, empty, filled, groups, share * (STEPS_H // 4), STEPS_H // 4,
                LINEARS[1], RANK, BLOCK_T, PADDED, SLOTS,
            )  # fmt: skip
        if LINEARS[2]:
            await_count(counters + GATE_UP_DONE + 32 * share, GATE_TILES // SPLIT)
            fence_before_tma(program)
            filled = _bring_again(
                inputs[4], inputs[5], rows, scales, ready, empty, filled, groups, share * STEPS_DOWN, STEPS_DOWN,
                LINEARS[2], RANK, BLOCK_T, PADDED, SLOTS,
            )  # fmt: skip
        if LINEARS[3]:
            await_count(counters + DOWN_DONE, TILES * finishers + SPLIT)
            fence_before_tma(program)
            _bring_again(
                inputs[6], inputs[7], rows, scales, ready, empty, filled, groups, share * (STEPS_H // 4), STEPS_H // 4,
                LINEARS[3], RANK, BLOCK_T, PADDED, SLOTS,
            )  # fmt: skip
    else:
        bring_rows(
            *inputs, rows, scales, ready, empty, counters, program, finishers, STEPS_O, STEPS_H, STEPS_DOWN, TILES,
            GATE_TILES, QKV_FIRST, HAS_QKV, BLOCK_T, PADDED, SLOTS, PDL, SPLIT,
        )  # fmt: skip
