"""The linears of a decoder layer between two attentions as one persistent kernel.

o -> gate_up -> down -> the next layer's q/k/v. Weights do not depend on other kernels: in each CTA (one per SM) a
producer warp streams all four matrices through one shared-memory ring and never waits for an activation. A second warp
loads activations, and only it waits for other CTAs, on counters in global memory. The consumer warps multiply and run
the epilogues. While the CTAs exchange sums between two linears, the ring continues to fill. The number of weight boxes
in flight is limited, because with a full ring in flight the CTAs drift apart and all wait for the last one.

No stage needs another CTA's row maximum: activations are quantized per token and 128 columns by the epilogue that
computes them, and 1 / rms is applied after the product. A CTA has the gate and up rows of the same 128 columns, so its
epilogue applies SiLU * mul. The K dimension of o and down is divided among four CTAs per tile; each of them finishes a
quarter of the tokens and adds the planes in a fixed order, so results are bitwise repeatable.

Counters. All are zero at the start; this launch resets them, or the next one before use. `planes_o`, `planes_down`,
`planes_qkv` count the parts of a tile, `o_done` and `down_done` finished quarters of tiles, `gate_up_done[s]` the
finished tiles of the s-th quarter of down's columns. CTA 0 clears the counters of stages after `o_done` before it
increments `o_done`. The first CTA of the last stage clears the rest when `down_done` is full: then no CTA polls them.
All CTAs must be resident at once, and two launches must not overlap.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..core.gluon_support import cta_barrier, gdc_wait
from .epilogues import (
    SILU_ROTATES,
    add_residual,
    collect,
    inverse_rms,
    multiply,
    publish,
    residual_inputs,
    store_quantized,
)
from .producers import (
    DOWN_DONE,
    GATE_UP_DONE,
    O_DONE,
    PLANES_DOWN,
    PLANES_O,
    PLANES_QKV,
    SPLIT,
    bring_rows,
    clear,
    stream_weights,
)


@gluon.jit
def _compute(
    ring, ready, empty, rows, scales, rows_ready, rows_empty, counters, planes, residual, new_residual, gain, next_gain,
    o_scale, gate_up_scale, down_scale, qkv_scale, gate_q, gate_q_scale, down_q, down_q_scale, qkv_q, qkv_q_scale,
    squares, next_squares, out, program, tokens, eps, STEPS_O: gl.constexpr, STEPS_H: gl.constexpr,
    STEPS_DOWN: gl.constexpr, TILES: gl.constexpr, GATE_TILES: gl.constexpr, QKV_WIDTH: gl.constexpr,
    QKV_FIRST: gl.constexpr, HAS_QKV: gl.constexpr, BLOCK_T: gl.constexpr, PADDED: gl.constexpr, SLOTS: gl.constexpr,
    ROW_SLOTS: gl.constexpr, NORM_ROTATES: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run the products and epilogues of this CTA's part of every linear (consumer warps).

    ring, ready, empty                  [SLOTS, 128, 128] weight boxes; barriers of a filled and of a freed slot
    rows, scales                        [ROW_SLOTS, BLOCK_T, 128] activations, [ROW_SLOTS, 1, PADDED] their scales
    rows_ready, rows_empty              barriers of both
    program                             index of this CTA
    WARPS                               consumer warps
    the others                          as in `decoder_block_kernel`
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_T, 32]
    )
    # 8 adjacent outputs of a token per thread
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    WIDTH: gl.constexpr = TILES * 128
    OWN: gl.constexpr = BLOCK_T // SPLIT
    tile = program // SPLIT
    part = program % SPLIT
    used = 0
    rows_used = 0
    nothing = gl.zeros([128, BLOCK_T], gl.float32, MMA)
    if PDL:
        gdc_wait()
    if program == 0:  # clear counters of later stages; CTAs use these only after CTA 0's arrival in O_DONE
        clear(counters, DOWN_DONE, 4, WARPS)
        clear(counters, GATE_UP_DONE, 128, WARPS)
        clear(counters, PLANES_DOWN, 128, WARPS)
        clear(counters, PLANES_QKV, 256, WARPS)
    row_scale, own_gain, old = residual_inputs(o_scale, residual, gain, tile, part, tokens, WIDTH, BLOCK_T, STORE)
    acc, _, used, rows_used = multiply(
        ring, ready, empty, rows, scales, rows_ready, rows_empty, used, rows_used, STEPS_O, nothing, nothing, False,
        BLOCK_T, SLOTS, ROW_SLOTS, MMA,
    )  # fmt: skip
    publish(acc, planes, counters + PLANES_O, tile, part, tokens, SPLIT, BLOCK_T, STORE)
    if part * OWN < tokens:
        own = part * OWN + gl.arange(0, OWN, gl.SliceLayout(0, STORE))
        update = collect(planes, counters + PLANES_O, tile, own, SPLIT, BLOCK_T, STORE) * row_scale[:, None]
        add_residual(
            update, own_gain, old, counters + O_DONE, new_residual, gate_q, gate_q_scale, squares, tile, part, tokens,
            WIDTH, BLOCK_T, PADDED, NORM_ROTATES, STORE,
        )  # fmt: skip
    if program < GATE_TILES:
        row = gl.arange(0, 128, gl.SliceLayout(1, STORE))
        token = gl.arange(0, BLOCK_T, gl.SliceLayout(0, STORE))
        gate_scale = gl.load(gate_up_scale + program * 128 + row)
        up_scale = gl.load(gate_up_scale + (GATE_TILES + program) * 128 + row)
        # once the activations are ready, so are the sums of squares
        mbarrier.wait(rows_ready.index(rows_used % ROW_SLOTS), rows_used // ROW_SLOTS & 1)
        token_scale = inverse_rms(squares, token, eps, TILES, BLOCK_T, BLOCK_T, STORE)
        gate_acc, up_acc, used, rows_used = multiply(
            ring, ready, empty, rows, scales, rows_ready, rows_empty, used, rows_used, STEPS_H, nothing, nothing, True,
            BLOCK_T, SLOTS, ROW_SLOTS, MMA,
        )  # fmt: skip
        gate = gl.convert_layout(gate_acc, STORE) * gate_scale[:, None] * token_scale[None, :]
        up = gl.convert_layout(up_acc, STORE) * up_scale[:, None] * token_scale[None, :]
        store_quantized(
            gate / (1.0 + gl.exp(-gate)) * up, down_q, down_q_scale, program, row, token, tokens, GATE_TILES * 128,
            PADDED, SILU_ROTATES, STORE,
        )  # fmt: skip
        cta_barrier()
        gl.atomic_add(counters + GATE_UP_DONE + 32 * (program // (GATE_TILES // SPLIT)), 1, sem="release")
    row_scale, own_gain, old = residual_inputs(
        down_scale, new_residual, next_gain, tile, part, tokens, WIDTH, BLOCK_T, STORE
    )
    acc, _, used, rows_used = multiply(
        ring, ready, empty, rows, scales, rows_ready, rows_empty, used, rows_used, STEPS_DOWN, nothing, nothing, False,
        BLOCK_T, SLOTS, ROW_SLOTS, MMA,
    )  # fmt: skip
    publish(acc, planes, counters + PLANES_DOWN, tile, part, tokens, SPLIT, BLOCK_T, STORE)
    if part * OWN < tokens:
        own = part * OWN + gl.arange(0, OWN, gl.SliceLayout(0, STORE))
        update = collect(planes, counters + PLANES_DOWN, tile, own, SPLIT, BLOCK_T, STORE) * row_scale[:, None]
        add_residual(
            update, own_gain, old, counters + DOWN_DONE, new_residual, qkv_q, qkv_q_scale, next_squares, tile, part,
            tokens, WIDTH, BLOCK_T, PADDED, NORM_ROTATES, STORE,
        )  # fmt: skip
    if HAS_QKV:  # noqa: SIM102  a constant
        if program >= QKV_FIRST:
            share = program - QKV_FIRST
            row_scale = gl.load(qkv_scale + share // 2 * 128 + gl.arange(0, 128, gl.SliceLayout(1, STORE)))
            qkv_acc, _nothing, used, rows_used = multiply(
                ring, ready, empty, rows, scales, rows_ready, rows_empty, used, rows_used, STEPS_H // 2, nothing,
                nothing, False, BLOCK_T, SLOTS, ROW_SLOTS, MMA,
            )  # fmt: skip
            half = gl.arange(0, BLOCK_T // 2, gl.SliceLayout(0, STORE)) + share % 2 * (BLOCK_T // 2)
            token_scale = inverse_rms(next_squares, half, eps, TILES, BLOCK_T, BLOCK_T // 2, STORE)
            publish(qkv_acc, planes, counters + PLANES_QKV, share // 2, share % 2, tokens, 2, BLOCK_T, STORE)
            if share % 2 * (BLOCK_T // 2) < tokens:
                value = (
                    collect(planes, counters + PLANES_QKV, share // 2, half, 2, BLOCK_T, STORE)
                    * row_scale[:, None]
                    * token_scale[None, :]
                )
                column = share // 2 * 128 + gl.arange(0, 128, gl.SliceLayout(1, STORE))
                gl.store(
                    out + half[None, :] * QKV_WIDTH + column[:, None],
                    value.to(out.dtype.element_ty),
                    mask=(half < tokens)[None, :],
                )


@gluon.jit(do_not_specialize=["tokens"])  # one compilation for every token count of a block
def decoder_block_kernel(
    o_boxes, gate_up_boxes, down_boxes, qkv_boxes, o_rows, o_row_scales, gate_rows, gate_row_scales, down_rows,
    down_row_scales, qkv_rows, qkv_row_scales, o_scale, gate_up_scale, down_scale, qkv_scale, gate_q, gate_q_scale,
    down_q, down_q_scale, qkv_q, qkv_q_scale, squares, next_squares, residual, new_residual, gain, next_gain, out,
    planes, counters, tokens, eps, STEPS_O: gl.constexpr, STEPS_H: gl.constexpr, STEPS_DOWN: gl.constexpr,
    TILES: gl.constexpr, GATE_TILES: gl.constexpr, QKV_WIDTH: gl.constexpr, QKV_FIRST: gl.constexpr,
    HAS_QKV: gl.constexpr, BLOCK_T: gl.constexpr, PADDED: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr,
    DEPTH: gl.constexpr, EARLY_DEPTH: gl.constexpr, NORM_ROTATES: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Compute one CTA's part: T tokens, A attention width, H hidden size, I intermediate size, N q/k/v width.

    o_boxes, gate_up_boxes, down_boxes, qkv_boxes   TMA boxes [128, 128] of the weights [H, A], [2I, H], [H, I], [N, H],
                                                    all e4m3 or all int8, as are the activations
    o_rows, gate_rows, down_rows, qkv_rows          TMA boxes [BLOCK_T, 128] of the activations [T, A], and in scratch
                                                    [BLOCK_T, H], [BLOCK_T, I], [BLOCK_T, H]
    *_row_scales                                    TMA boxes [1, PADDED] of their scales [columns / 128, PADDED] fp32
    o_scale, gate_up_scale, down_scale, qkv_scale   the weights' scales, one per row, fp32
    gate_q, down_q, qkv_q and *_q_scale             activations and scales in scratch, as pointers for writes
    squares, next_squares                           [TILES, BLOCK_T] fp32: sums of squares of a tile's columns
    residual, new_residual                          [T, H], the model's dtype, or fp16 in a bf16 model
    gain, next_gain                                 [H] weights of both norms, the model's dtype
    out                                             [T, N], the model's dtype; unused without HAS_QKV
    planes                                          [TILES, SPLIT, BLOCK_T, 128] fp32: partial sums of a tile
    counters                                        [COUNTERS] int32, see above
    tokens, eps                                     T; epsilon of the norms
    STEPS_O, STEPS_H, STEPS_DOWN                    blocks of 128 columns: A / SPLIT, H, I / SPLIT
    TILES, GATE_TILES                               tiles of 128 rows: of o and of down (H), of gate (I)
    QKV_WIDTH, QKV_FIRST, HAS_QKV                   N; the first CTA of the last stage; whether there is q/k/v
    BLOCK_T, PADDED                                 tokens of a product; allocated scales per row
    SLOTS, ROW_SLOTS                                slots of the rings of weights and of activations
    DEPTH, EARLY_DEPTH                              weight boxes in flight, and during the previous matrix's product
    NORM_ROTATES                                    in int8, columns of a rotated block of the norms' results
    PDL, num_warps                                  programmatic dependent launch; consumer warps
    """
    program = gl.program_id(0)
    ring = gl.allocate_shared_memory(o_boxes.dtype, [SLOTS, 128, 128], o_boxes.layout)
    rows = gl.allocate_shared_memory(o_rows.dtype, [ROW_SLOTS, BLOCK_T, 128], o_rows.layout)
    scales = gl.allocate_shared_memory(gl.float32, [ROW_SLOTS, 1, PADDED], o_row_scales.layout)
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
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    ring,
                    ready,
                    empty,
                    rows,
                    scales,
                    rows_ready,
                    rows_empty,
                    counters,
                    planes,
                    residual,
                    new_residual,
                    gain,
                    next_gain,
                    o_scale,
                    gate_up_scale,
                    down_scale,
                    qkv_scale,
                    gate_q,
                    gate_q_scale,
                    down_q,
                    down_q_scale,
                    qkv_q,
                    qkv_q_scale,
                    squares,
                    next_squares,
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
                    HAS_QKV,
                    BLOCK_T,
                    PADDED,
                    SLOTS,
                    ROW_SLOTS,
                    NORM_ROTATES,
                    num_warps,
                    PDL,
                ),
            ),
            (
                stream_weights,
                (
                    o_boxes,
                    gate_up_boxes,
                    down_boxes,
                    qkv_boxes,
                    ring,
                    ready,
                    empty,
                    program,
                    STEPS_O,
                    STEPS_H,
                    STEPS_DOWN,
                    GATE_TILES,
                    QKV_FIRST,
                    HAS_QKV,
                    SLOTS,
                    DEPTH,
                    EARLY_DEPTH,
                    PDL,
                ),
            ),
            (
                bring_rows,
                (
                    o_rows,
                    o_row_scales,
                    gate_rows,
                    gate_row_scales,
                    down_rows,
                    down_row_scales,
                    qkv_rows,
                    qkv_row_scales,
                    rows,
                    scales,
                    rows_ready,
                    rows_empty,
                    counters,
                    program,
                    finishers,
                    STEPS_O,
                    STEPS_H,
                    STEPS_DOWN,
                    TILES,
                    GATE_TILES,
                    QKV_FIRST,
                    HAS_QKV,
                    BLOCK_T,
                    PADDED,
                    ROW_SLOTS,
                    PDL,
                ),
            ),
        ],
        [1, 1],
        [32, 32],
    )
