"""The whole decode layer of `decoder_block_gluon.py` with the LoRA branches of its linears inside the same launch.

Four more CTAs than the base needs do nothing but shrink: each multiplies a quarter of every linear's K with the A rows
of all active adapters, packed 128 to a product, and leaves an fp32 plane [tokens, ranks]. It works beside the base's
products of the same activations, so nothing waits for it but o. A CTA that finishes an output tile adds the four planes
in order, takes each token's own adapter, rounds the ranks' activations to eight bits with one scale a token, and
multiplies them with the B rows that its ring brought behind the base weights: one product an adapter, of which each
token keeps its own. The delta joins in fp32.

Where the planes are fetched: o while the other parts of the tile are waited for; gate_up, down and q/k/v before the
last quarter of their steps, while the ring is full. Counters as in the base kernel, and one a linear that counts its
four shrinking CTAs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..core.gluon_support import cta_barrier, gdc_wait
from .lora_pieces import expand, fetch, multiply_slots, own_columns, shrink
from .lora_streams import COUNTS, bring_lora_rows, operand_layout, stream_lora_weights
from .pieces import SILU_ROTATES, add_residual, collect, inverse_rms, publish, residual_inputs, store_quantized
from .streams import (
    DOWN_DONE,
    GATE_UP_DONE,
    O_DONE,
    PLANES_DOWN,
    PLANES_O,
    PLANES_QKV,
    SHRUNK_DOWN,
    SHRUNK_GATE_UP,
    SHRUNK_O,
    SHRUNK_QKV,
    SPLIT,
    clear,
)


@gluon.jit
def _compute(
    slots, blocks, shrunk, factors, counters, groups, planes, shrunk_planes, a_scales, residual, new_residual, gains,
    weight_scales, activations, out, program, tokens, eps, STEPS_O: gl.constexpr, STEPS_H: gl.constexpr,
    STEPS_DOWN: gl.constexpr, TILES: gl.constexpr, GATE_TILES: gl.constexpr, QKV_WIDTH: gl.constexpr,
    QKV_FIRST: gl.constexpr, KEY_TILE: gl.constexpr, VALUE_TILE: gl.constexpr, LINEARS: gl.constexpr,
    RANK: gl.constexpr, STRIDE: gl.constexpr, BLOCK_T: gl.constexpr, PADDED: gl.constexpr, SLOTS: gl.constexpr,
    ROW_SLOTS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_T, 32]
    )
    # 8 neighbouring outputs of a token a thread
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    WIDTH: gl.constexpr = TILES * 128
    QUARTER: gl.constexpr = BLOCK_T // SPLIT
    HALF: gl.constexpr = BLOCK_T // 2
    WIDE: gl.constexpr = QUARTER if QUARTER > 8 else 8  # columns of the narrowest product
    QUARTER_MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, WIDE, 32]
    )
    HALF_MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, HALF, 32]
    )
    PLANES: gl.constexpr = SPLIT * BLOCK_T * STRIDE
    gate_q, gate_q_scale, down_q, down_q_scale, qkv_q, qkv_q_scale, squares, next_squares = activations
    used = 0
    rows_used = 0
    nothing = gl.zeros([128, BLOCK_T], gl.float32, MMA)
    if PDL:
        gdc_wait()
    if program >= TILES * SPLIT:
        share = program - TILES * SPLIT
        if LINEARS[0]:
            used, rows_used = shrink(
                slots, blocks, used, rows_used, groups, a_scales[0], shrunk_planes, counters + SHRUNK_O, share, tokens,
                STEPS_O, LINEARS[0], RANK, STRIDE, BLOCK_T, SLOTS, ROW_SLOTS, MMA,
            )  # fmt: skip
        if LINEARS[1]:
            used, rows_used = shrink(
                slots, blocks, used, rows_used, groups, a_scales[1], shrunk_planes + PLANES, counters + SHRUNK_GATE_UP,
                share, tokens, STEPS_H // 4, LINEARS[1], RANK, STRIDE, BLOCK_T, SLOTS, ROW_SLOTS, MMA,
            )  # fmt: skip
        if LINEARS[2]:
            used, rows_used = shrink(
                slots, blocks, used, rows_used, groups, a_scales[2], shrunk_planes + 2 * PLANES, counters + SHRUNK_DOWN,
                share, tokens, STEPS_DOWN, LINEARS[2], RANK, STRIDE, BLOCK_T, SLOTS, ROW_SLOTS, MMA,
            )  # fmt: skip
        if LINEARS[3]:
            used, rows_used = shrink(
                slots, blocks, used, rows_used, groups, a_scales[3], shrunk_planes + 3 * PLANES, counters + SHRUNK_QKV,
                share, tokens, STEPS_H // 4, LINEARS[3], RANK, STRIDE, BLOCK_T, SLOTS, ROW_SLOTS, MMA,
            )  # fmt: skip
    else:
        tile = program // SPLIT
        part = program % SPLIT
        if program == 0:  # counters of the stages behind o; whoever uses them has first seen CTA 0 counted into O_DONE
            clear(counters, DOWN_DONE, 4, WARPS)
            clear(counters, GATE_UP_DONE, 128, WARPS)
            clear(counters, PLANES_DOWN, 128, WARPS)
            clear(counters, PLANES_QKV, 256, WARPS)
        any_adapter = gl.load(groups + COUNTS) > 0
        own_adapters = gl.load(groups + COUNTS + 3 + part) > 0
        own = part * QUARTER + gl.arange(0, QUARTER, gl.SliceLayout(0, STORE))
        quarter_shrunk = shrunk.index(0).slice(0, WIDE, dim=0)
        none = gl.zeros([128, WIDE], gl.float32, QUARTER_MMA)

        row_scale, gain, old = residual_inputs(
            weight_scales[0], residual, gains[0], tile, part, tokens, WIDTH, BLOCK_T, STORE
        )
        acc, nothing, used, rows_used = multiply_slots(
            slots, blocks, used, rows_used, STEPS_O, nothing, nothing, False, BLOCK_T, SLOTS, ROW_SLOTS, MMA
        )
        publish(acc, planes, counters + PLANES_O, tile, part, tokens, SPLIT, BLOCK_T, STORE)
        if part * QUARTER < tokens:
            update = gl.zeros([128, QUARTER], gl.float32, STORE)
            if LINEARS[0]:  # noqa: SIM102  a constant
                if own_adapters:
                    fetch(
                        quarter_shrunk, factors.index(0), shrunk_planes, counters + SHRUNK_O, groups, part * QUARTER, 0,
                        1, RANK, STRIDE, QUARTER, WIDE, BLOCK_T, WARPS,
                    )  # fmt: skip
                    delta, _second, used = expand(
                        slots, used, shrunk, factors, none, none, groups, 3 + part, 2, part * QUARTER, False, RANK,
                        QUARTER, WIDE, SLOTS, QUARTER_MMA,
                    )  # fmt: skip
                    update = own_columns(delta, QUARTER, WIDE, STORE)
            update += collect(planes, counters + PLANES_O, tile, own, SPLIT, BLOCK_T, STORE) * row_scale[:, None]
            add_residual(
                update, gain, old, counters + O_DONE, new_residual, gate_q, gate_q_scale, squares, tile, part, tokens,
                WIDTH, BLOCK_T, PADDED, STORE,
            )  # fmt: skip

        if program < GATE_TILES:
            row = gl.arange(0, 128, gl.SliceLayout(1, STORE))
            token = gl.arange(0, BLOCK_T, gl.SliceLayout(0, STORE))
            mma_row = program * 128 + gl.arange(0, 128, gl.SliceLayout(1, MMA))
            # the activations are there, so the sums of squares are
            mbarrier.wait(blocks[2].index(rows_used % ROW_SLOTS), rows_used // ROW_SLOTS & 1)
            factors.index(2).store(inverse_rms(squares, token, eps, TILES, BLOCK_T, BLOCK_T, STORE))
            LAST: gl.constexpr = STEPS_H // 4
            gate, up, used, rows_used = multiply_slots(
                slots, blocks, used, rows_used, STEPS_H - LAST, nothing, nothing, True, BLOCK_T, SLOTS, ROW_SLOTS, MMA
            )
            if LINEARS[1]:  # noqa: SIM102  a constant
                if any_adapter:
                    for side in gl.static_range(2):
                        fetch(
                            shrunk.index(side), factors.index(side), shrunk_planes + PLANES, counters + SHRUNK_GATE_UP,
                            groups, 0, side, 2, RANK, STRIDE, BLOCK_T, BLOCK_T, BLOCK_T, WARPS,
                        )  # fmt: skip
            gate, up, used, rows_used = multiply_slots(
                slots, blocks, used, rows_used, LAST, gate, up, True, BLOCK_T, SLOTS, ROW_SLOTS, MMA
            )
            gate = gate * gl.load(weight_scales[1] + mma_row)[:, None]
            up = up * gl.load(weight_scales[1] + GATE_TILES * 128 + mma_row)[:, None]
            if LINEARS[1]:
                gate, up, used = expand(
                    slots, used, shrunk, factors, gate, up, groups, 0, 0, 0, True, RANK, BLOCK_T, BLOCK_T, SLOTS, MMA,
                )  # fmt: skip
            token_scale = factors.index(2).load(gl.SliceLayout(0, STORE))
            gate = gl.convert_layout(gate, STORE) * token_scale[None, :]
            up = gl.convert_layout(up, STORE) * token_scale[None, :]
            store_quantized(
                gate / (1.0 + gl.exp(-gate)) * up,
                down_q,
                down_q_scale,
                program,
                row,
                token,
                tokens,
                GATE_TILES * 128,
                PADDED,
                SILU_ROTATES,
                STORE,
            )
            cta_barrier()
            gl.atomic_add(counters + GATE_UP_DONE + 32 * (program // (GATE_TILES // SPLIT)), 1, sem="release")

        row_scale, gain, old = residual_inputs(
            weight_scales[2], new_residual, gains[1], tile, part, tokens, WIDTH, BLOCK_T, STORE
        )
        LATE: gl.constexpr = STEPS_DOWN // 4
        acc, nothing, used, rows_used = multiply_slots(
            slots, blocks, used, rows_used, STEPS_DOWN - LATE, nothing, nothing, False, BLOCK_T, SLOTS, ROW_SLOTS, MMA
        )
        if LINEARS[2]:  # noqa: SIM102  a constant
            if own_adapters:
                fetch(
                    quarter_shrunk, factors.index(0), shrunk_planes + 2 * PLANES, counters + SHRUNK_DOWN, groups,
                    part * QUARTER, 0, 1, RANK, STRIDE, QUARTER, WIDE, BLOCK_T, WARPS,
                )  # fmt: skip
        acc, nothing, used, rows_used = multiply_slots(
            slots, blocks, used, rows_used, LATE, acc, nothing, False, BLOCK_T, SLOTS, ROW_SLOTS, MMA
        )
        publish(acc, planes, counters + PLANES_DOWN, tile, part, tokens, SPLIT, BLOCK_T, STORE)
        if part * QUARTER < tokens:
            update = gl.zeros([128, QUARTER], gl.float32, STORE)
            if LINEARS[2]:
                delta, _second, used = expand(
                    slots, used, shrunk, factors, none, none, groups, 3 + part, 2, part * QUARTER, False, RANK, QUARTER,
                    WIDE, SLOTS, QUARTER_MMA,
                )  # fmt: skip
                update = own_columns(delta, QUARTER, WIDE, STORE)
            update += collect(planes, counters + PLANES_DOWN, tile, own, SPLIT, BLOCK_T, STORE) * row_scale[:, None]
            add_residual(
                update, gain, old, counters + DOWN_DONE, new_residual, qkv_q, qkv_q_scale, next_squares, tile, part,
                tokens, WIDTH, BLOCK_T, PADDED, STORE,
            )  # fmt: skip

        if QKV_WIDTH:  # noqa: SIM102  a constant
            if program >= QKV_FIRST:
                qkv_tile = (program - QKV_FIRST) // 2
                half = (program - QKV_FIRST) % 2
                column = qkv_tile * 128 + gl.arange(0, 128, gl.SliceLayout(1, STORE))
                half_token = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, STORE))
                row_scale = gl.load(weight_scales[3] + column)
                half_shrunk = shrunk.index(0).slice(0, HALF, dim=0)
                END: gl.constexpr = STEPS_H // 8
                acc, nothing, used, rows_used = multiply_slots(
                    slots,
                    blocks,
                    used,
                    rows_used,
                    STEPS_H // 2 - END,
                    nothing,
                    nothing,
                    False,
                    BLOCK_T,
                    SLOTS,
                    ROW_SLOTS,
                    MMA,
                )
                if LINEARS[3]:  # noqa: SIM102  a constant
                    if gl.load(groups + COUNTS + 1 + half) > 0:
                        linear = (qkv_tile >= KEY_TILE).to(gl.int32) + (qkv_tile >= VALUE_TILE).to(gl.int32)
                        fetch(
                            half_shrunk, factors.index(0), shrunk_planes + 3 * PLANES, counters + SHRUNK_QKV, groups,
                            half * HALF, linear, 3, RANK, STRIDE, HALF, HALF, BLOCK_T, WARPS,
                        )  # fmt: skip
                acc, nothing, used, rows_used = multiply_slots(
                    slots, blocks, used, rows_used, END, acc, nothing, False, BLOCK_T, SLOTS, ROW_SLOTS, MMA
                )
                token_scale = inverse_rms(next_squares, half_token, eps, TILES, BLOCK_T, HALF, STORE)
                publish(acc, planes, counters + PLANES_QKV, qkv_tile, half, tokens, 2, BLOCK_T, STORE)
                if half * HALF < tokens:
                    value = gl.zeros([128, HALF], gl.float32, STORE)
                    if LINEARS[3]:
                        half_none = gl.zeros([128, HALF], gl.float32, HALF_MMA)
                        half_delta, _half_second, used = expand(
                            slots, used, shrunk, factors, half_none, half_none, groups, 1 + half, 1, half * HALF, False,
                            RANK, HALF, HALF, SLOTS, HALF_MMA,
                        )  # fmt: skip
                        value = gl.convert_layout(half_delta, STORE)
                    value += (
                        collect(planes, counters + PLANES_QKV, qkv_tile, half_token, 2, BLOCK_T, STORE)
                        * row_scale[:, None]
                    )
                    value = value * token_scale[None, :]
                    gl.store(
                        out + half_token[None, :] * QKV_WIDTH + column[:, None],
                        value.to(out.dtype.element_ty),
                        mask=(half_token < tokens)[None, :],
                    )


@gluon.jit(do_not_specialize=["tokens"])  # one compilation for every token count of a block
def decoder_block_lora_kernel(
    o_boxes, gate_up_boxes, down_boxes, qkv_boxes, o_a, o_b, o_b_scale, gate_up_a, gate_up_b, gate_up_b_scale, down_a,
    down_b, down_b_scale, qkv_a, qkv_b, qkv_b_scale, o_rows, o_row_scales, gate_rows, gate_row_scales, down_rows,
    down_row_scales, qkv_rows, qkv_row_scales, o_scale, gate_up_scale, down_scale, qkv_scale, o_a_scale,
    gate_up_a_scale, down_a_scale, qkv_a_scale, groups, shrunk_planes, gate_q, gate_q_scale, down_q, down_q_scale,
    qkv_q, qkv_q_scale, squares, next_squares, residual, new_residual, gain, next_gain, out, planes, counters, tokens,
    eps, STEPS_O: gl.constexpr, STEPS_H: gl.constexpr, STEPS_DOWN: gl.constexpr, TILES: gl.constexpr,
    GATE_TILES: gl.constexpr, QKV_WIDTH: gl.constexpr, QKV_FIRST: gl.constexpr, KEY_TILE: gl.constexpr,
    VALUE_TILE: gl.constexpr, LINEARS: gl.constexpr, RANK: gl.constexpr, STRIDE: gl.constexpr, BLOCK_T: gl.constexpr,
    PADDED: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr, DEPTH: gl.constexpr, EARLY_DEPTH: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`*_boxes`, `*_a`, `*_b`, `*_b_scale` and `*_rows`, `*_row_scales` are TMA descriptors; `*_q` are the same
    activations as pointers.

    LINEARS: how many linears with LoRA are packed in o, gate_up, down and q/k/v (0: none has it; its descriptors are
    any other's then).
    """
    program = gl.program_id(0)
    ring = gl.allocate_shared_memory(o_boxes.dtype, [SLOTS, 128, 128], o_boxes.layout)
    rows = gl.allocate_shared_memory(o_rows.dtype, [ROW_SLOTS, BLOCK_T, 128], o_rows.layout)
    scales = gl.allocate_shared_memory(gl.float32, [ROW_SLOTS, 1, PADDED], o_row_scales.layout)
    shrunk = gl.allocate_shared_memory(o_boxes.dtype, [2, BLOCK_T, RANK], operand_layout(RANK))
    factors = gl.allocate_shared_memory(gl.float32, [3, BLOCK_T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    rows_ready = gl.allocate_shared_memory(gl.int64, [ROW_SLOTS, 1], mbarrier.MBarrierLayout())
    rows_empty = gl.allocate_shared_memory(gl.int64, [ROW_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(ROW_SLOTS):
        mbarrier.init(rows_ready.index(i), count=1)
        mbarrier.init(rows_empty.index(i), count=1)
    fence_async_shared()
    # CTAs of a tile of o or down that own tokens
    finishers = gl.minimum((tokens + (BLOCK_T // SPLIT - 1)) // (BLOCK_T // SPLIT), SPLIT)
    inputs = (o_rows, o_row_scales, gate_rows, gate_row_scales, down_rows, down_row_scales, qkv_rows, qkv_row_scales)
    activations = (gate_q, gate_q_scale, down_q, down_q_scale, qkv_q, qkv_q_scale, squares, next_squares)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    (ring, ready, empty),
                    (rows, scales, rows_ready, rows_empty),
                    shrunk,
                    factors,
                    counters,
                    groups,
                    planes,
                    shrunk_planes,
                    (o_a_scale, gate_up_a_scale, down_a_scale, qkv_a_scale),
                    residual,
                    new_residual,
                    (gain, next_gain),
                    (o_scale, gate_up_scale, down_scale, qkv_scale),
                    activations,
                    out,
                    program,
                    tokens,
                    eps,
                    STEPS_O,
                    STEPS_H,
                    STEPS_DOWN,
                    TILES,
                    GATE_TILES,
                    QKV_WIDTH,
                    QKV_FIRST,
                    KEY_TILE,
                    VALUE_TILE,
                    LINEARS,
                    RANK,
                    STRIDE,
                    BLOCK_T,
                    PADDED,
                    SLOTS,
                    ROW_SLOTS,
                    num_warps,
                    PDL,
                ),
            ),
            (
                stream_lora_weights,
                (
                    o_boxes,
                    gate_up_boxes,
                    down_boxes,
                    qkv_boxes,
                    (o_a, gate_up_a, down_a, qkv_a),
                    (o_b, gate_up_b, down_b, qkv_b),
                    (o_b_scale, gate_up_b_scale, down_b_scale, qkv_b_scale),
                    ring,
                    ready,
                    empty,
                    groups,
                    program,
                    STEPS_O,
                    STEPS_H,
                    STEPS_DOWN,
                    TILES,
                    GATE_TILES,
                    QKV_WIDTH,
                    QKV_FIRST,
                    LINEARS,
                    RANK,
                    SLOTS,
                    DEPTH,
                    EARLY_DEPTH,
                    PDL,
                ),
            ),
            (
                bring_lora_rows,
                (
                    inputs,
                    rows,
                    scales,
                    rows_ready,
                    rows_empty,
                    counters,
                    groups,
                    program,
                    finishers,
                    STEPS_O,
                    STEPS_H,
                    STEPS_DOWN,
                    TILES,
                    GATE_TILES,
                    QKV_FIRST,
                    QKV_WIDTH > 0,
                    LINEARS,
                    RANK,
                    BLOCK_T,
                    PADDED,
                    ROW_SLOTS,
                    PDL,
                ),
            ),
        ],
        [1, 1],
        [40, 40],
    )
