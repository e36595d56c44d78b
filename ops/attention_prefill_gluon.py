"""Attention of query chunks over paged history in 8 bits for Hopper in Gluon: head_dim 128, 1 to 32 query heads a KV head in powers of two.

A program's warps have four trades. One warp copies pages to shared memory by TMA. Four warps convert what the tensor cores cannot multiply as it
lies there to fp16, its scale multiplied in: V, and K too unless Q K^T runs in e4m3. Two groups of four warps each own 64 rows
(row = token * group + head of the group) of the same 128 and share every page; Q and P stay in registers, so that a product reads shared memory
once, unless Q has 16 bits. In a group, the product P V of one step of two pages runs on the tensor cores while the softmax of the next step runs beside it.

Programs are persistent: one an SM, tiles dealt from the longest down. Tiles find their sequence as in attention_prefill. A row's pages are
walked from its newest to the oldest, so that causal masks (and the odd page, which is then copied twice) belong to the first steps only.
"""
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .attention_gluon_pieces import LOWEST, gdc_launch_dependents, gdc_wait, load_box, view_shared
from .attention_pieces import LOG2_E, multiprocessors
from .attention_prefill_gluon_pieces import (
    ROWS,
    STEP,
    WIDENED,
    converter_layout,
    fetch,
    find_tile,
    output_layout,
    score_layout,
    tile_rows,
    unpack,
    weigh,
    widen,
)
from .kv_layout import PAGE_SIZE, QUANTIZED_MAX
from .triton_support import INTERPRETED, next_power_of_2

HEAD_DIM = 128
# registers of a thread: the second group of rows (the first gets as many), the converters, the copier
REGISTERS = (224, 40, 24)
CONVERTERS = 4  # warps


@gluon.jit
def produce(
    boxes, scale_boxes, block_table, query_start, context_lens, tokens, sequences, num_blocks, tiles, items,
    keys, key_scales, keys_ready, keys_free, raw, raw_scales, raw_ready, raw_free,
    HK: gl.constexpr, TILE: gl.constexpr, SEQUENCES: gl.constexpr, FP8_SCORES: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    """The warp that copies pages."""
    BYTES: gl.constexpr = STEP * 132  # with the scales
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, sequence, _first_token, _end, position, length, steps, _whole = find_tile(
            item, query_start, context_lens, tokens, sequences, tiles, HK, TILE, SEQUENCES, 1)
        table = block_table + sequence * num_blocks
        last = (gl.minimum(length, position + TILE) - 1) // 64
        for j in range(steps):
            block = (steps - 1 - j) * 2
            first = (gl.load(table + block) * HK + head) * 2
            second = (gl.load(table + gl.minimum(block + 1, last)) * HK + head) * 2
            for which in gl.static_range(2):
                if which == 1 or not FP8_SCORES:
                    n = step if FP8_SCORES else step * 2 + which
                    slot = n % RAW
                    mbarrier.wait(raw_free.index(slot), (n // RAW & 1) ^ 1)
                    ready = raw_ready.index(slot)
                    mbarrier.expect(ready, BYTES)
                    fetch(boxes, raw, ready, slot, (first + which) * 64, (second + which) * 64)
                    load_box(scale_boxes, [first + which, 0], ready, raw_scales.index(slot * 2))
                    load_box(scale_boxes, [second + which, 0], ready, raw_scales.index(slot * 2 + 1))
                else:
                    slot = step % STAGES
                    mbarrier.wait(keys_free.index(slot), (step // STAGES & 1) ^ 1)
                    ready = keys_ready.index(slot)
                    mbarrier.expect(ready, BYTES)
                    fetch(boxes, keys, ready, slot, first * 64, second * 64)
                    load_box(scale_boxes, [first, 0], ready, key_scales.index(slot * 2))
                    load_box(scale_boxes, [second, 0], ready, key_scales.index(slot * 2 + 1))
            step += 1


@gluon.jit
def convert_tile(raw, raw_scales, raw_ready, raw_free, n, target, ready, free, step, LIMIT: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr,
                 WARPS: gl.constexpr):
    PIECE: gl.constexpr = 32
    LAYOUT: gl.constexpr = converter_layout(WARPS)
    slot = n % RAW
    goal = step % STAGES
    mbarrier.wait(raw_ready.index(slot), n // RAW & 1)
    mbarrier.wait(free.index(goal), (step // STAGES & 1) ^ 1)
    for i in gl.static_range(STEP // PIECE):
        x = raw.index(slot * (STEP // PIECE) + i).load(LAYOUT)
        scale = raw_scales.index(slot * (STEP // PIECE) + i).load(gl.SliceLayout(1, LAYOUT))
        scale = gl.minimum(scale * WIDENED, 65440.0 / LIMIT)  # rounded up to fp16 too, no product overflows
        pair = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1)
        target.index(goal).slice(i * PIECE, PIECE).store(widen(x, pair[:, None]))
    fence_async_shared()
    mbarrier.arrive(ready.index(goal), count=1)
    mbarrier.arrive(raw_free.index(slot), count=1)


@gluon.jit
def convert(
    query_start, context_lens, tokens, sequences, tiles, items,
    keys, keys_ready, keys_free, raw, raw_scales, raw_ready, raw_free, values, values_ready, values_free,
    HK: gl.constexpr, TILE: gl.constexpr, SEQUENCES: gl.constexpr, FP8_SCORES: gl.constexpr, LIMIT: gl.constexpr,
    STAGES: gl.constexpr, RAW: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The warps that make fp16 of the cache."""
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _head, _sequence, _first_token, _end, _position, _length, steps, _whole = find_tile(
            item, query_start, context_lens, tokens, sequences, tiles, HK, TILE, SEQUENCES, WARPS)
        for _j in range(steps):
            if FP8_SCORES:
                convert_tile(raw, raw_scales, raw_ready, raw_free, step, values, values_ready, values_free, step, LIMIT, STAGES, RAW, WARPS)
            else:
                convert_tile(raw, raw_scales, raw_ready, raw_free, step * 2, keys, keys_ready, keys_free, step, LIMIT, STAGES, RAW, WARPS)
                convert_tile(raw, raw_scales, raw_ready, raw_free, step * 2 + 1, values, values_ready, values_free, step, LIMIT, STAGES, RAW, WARPS)
            step += 1


@gluon.jit
def attend(
    begin, stop, base, steps, q, factor, position, top, total, acc, p, keys, key_scales, keys_ready, keys_free, values, values_ready, values_free,
    FP8_SCORES: gl.constexpr, MASK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Steps begin..stop: each multiplies the step before by its values while it weighs its own keys."""
    SCORES: gl.constexpr = score_layout(FP8_SCORES)
    OUTPUT: gl.constexpr = output_layout()
    nothing = gl.zeros([ROWS, STEP], gl.float32, SCORES)
    for j in range(begin, stop):
        step = base + j
        slot = step % STAGES
        before = (step - 1) % STAGES
        mbarrier.wait(keys_ready.index(slot), step // STAGES & 1)
        scores = warpgroup_mma(q, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(values_ready.index(before), (step - 1) // STAGES & 1)
        product = warpgroup_mma(unpack(p), values.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p, keep, top, total = weigh(scores, key_scales, slot, factor, top, total, (steps - 1 - j) * STEP, position, FP8_SCORES, MASK)
        mbarrier.arrive(keys_free.index(slot), count=1)
        acc = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(values_free.index(before), count=1)
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, OUTPUT))[:, None]
    return top, total, acc, p


@gluon.jit
def consume(
    q, out, query_start, context_lens, scale_log2, tokens, sequences, tiles, items,
    queries, staged, keys, key_scales, keys_ready, keys_free, values, values_ready, values_free,
    WHO: gl.constexpr, HK: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, SEQUENCES: gl.constexpr,
    FP8_SCORES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps of 64 rows: group WHO of the two."""
    SCORES: gl.constexpr = score_layout(FP8_SCORES)
    OUTPUT: gl.constexpr = output_layout()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 4 if FP8_SCORES else 2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    base = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, _sequence, first_token, end, position, _length, steps, whole = find_tile(
            item, query_start, context_lens, tokens, sequences, tiles, HK, TILE, SEQUENCES, 4)
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
                else:  # 16 bits would take too many registers
                    queries.index(WHO).store(operand.to(gl.float16))
                    fence_async_shared()
                    operand = queries.index(WHO)
                    factor = factor * (1.0 / WIDENED)
                here = position + WHO * (TILE // 2) + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) // GROUP
                top = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
                total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
                acc = gl.zeros([ROWS, 128], gl.float32, OUTPUT)
                slot = base % STAGES
                mbarrier.wait(keys_ready.index(slot), base // STAGES & 1)
                scores = warpgroup_mma(operand, keys.index(slot).permute((1, 0)), gl.zeros([ROWS, STEP], gl.float32, SCORES), use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(0, deps=(scores,))
                p, _keep, top, total = weigh(scores, key_scales, slot, factor, top, total, (steps - 1) * STEP, here, FP8_SCORES, True)
                mbarrier.arrive(keys_free.index(slot), count=1)
                masked = gl.maximum(steps - whole, 1)
                top, total, acc, p = attend(1, masked, base, steps, operand, factor, here, top, total, acc, p, keys, key_scales, keys_ready, keys_free,
                                            values, values_ready, values_free, FP8_SCORES, True, STAGES)  # fmt: skip
                top, total, acc, p = attend(masked, steps, base, steps, operand, factor, here, top, total, acc, p, keys, key_scales, keys_ready, keys_free,
                                            values, values_ready, values_free, FP8_SCORES, False, STAGES)  # fmt: skip
                newest = base + steps - 1
                slot = newest % STAGES
                mbarrier.wait(values_ready.index(slot), newest // STAGES & 1)
                product = warpgroup_mma(unpack(p), values.index(slot), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(values_free.index(slot), count=1)
                share = 1.0 / gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))
                share = share * (1.0 / WIDENED)
                staged.index(WHO).store((acc * share[:, None]).to(out.dtype.element_ty))
                offsets, is_query = tile_rows(own, end, head, STORE, HK, GROUP)
                gl.store(out + at + offsets, staged.index(WHO).load(STORE), mask=is_query)
            else:
                offsets, is_query = tile_rows(own, end, head, STORE, HK, GROUP)
                gl.store(out + at + offsets, gl.zeros([ROWS, 128], out.dtype.element_ty, STORE), mask=is_query)
        else:
            for j in range(steps):  # the other group's pages
                step = base + j
                slot = step % STAGES
                mbarrier.wait(keys_ready.index(slot), step // STAGES & 1)
                mbarrier.arrive(keys_free.index(slot), count=1)
                mbarrier.wait(values_ready.index(slot), step // STAGES & 1)
                mbarrier.arrive(values_free.index(slot), count=1)
        base += steps


@gluon.jit(do_not_specialize=["tokens", "sequences", "num_blocks", "tiles", "items"])
def prefill_kernel(
    boxes, scale_boxes, q, block_table, context_lens, query_start, out, scale_log2, tokens, sequences, num_blocks, tiles, items,
    HK: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr, SEQUENCES: gl.constexpr, FP8_SCORES: gl.constexpr,
    LIMIT: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr, WARPS: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """q, out [T, HK * GROUP, 128]; boxes [NP * HK * 128, 128] and scale_boxes [NP * HK * 2, 64] are TMA descriptors of 64 x 128 bytes and 1 x 64."""
    STORED: gl.constexpr = boxes.dtype
    BOX: gl.constexpr = boxes.layout
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(values_ready.index(i), count=1)
        mbarrier.init(keys_free.index(i), count=2)
        mbarrier.init(values_free.index(i), count=2)
    raw_ready = gl.allocate_shared_memory(gl.int64, [RAW, 1], mbarrier.MBarrierLayout())
    raw_free = gl.allocate_shared_memory(gl.int64, [RAW, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RAW):
        mbarrier.init(raw_ready.index(i), count=1)
        mbarrier.init(raw_free.index(i), count=1)
    OUT: gl.constexpr = out.dtype.element_ty
    staged = gl.allocate_shared_memory(OUT, [2, ROWS, 128], WIDE)  # a tile's result on its way out, and before that its queries if those have 16 bits
    queries = view_shared(staged, gl.float16, [2, ROWS, 128], WIDE)
    if FP8_SCORES:  # keys are multiplied as they lie in the cache
        key_boxes = gl.allocate_shared_memory(boxes.dtype, [STAGES * 2, 64, 128], boxes.layout)
        keys = view_shared(key_boxes, STORED, [STAGES, STEP, 128], BOX)
    else:
        keys = gl.allocate_shared_memory(gl.float16, [STAGES, STEP, 128], WIDE)
        key_boxes = keys
    values = gl.allocate_shared_memory(gl.float16, [STAGES, STEP, 128], WIDE)
    raw = gl.allocate_shared_memory(boxes.dtype, [RAW * 2, 64, 128], boxes.layout)
    raw_pieces = view_shared(raw, STORED, [RAW * 4, 32, 128], BOX)
    raw_scales = gl.allocate_shared_memory(gl.float32, [RAW * 2, 1, 64], scale_boxes.layout)
    raw_scale_pieces = view_shared(raw_scales, gl.float32, [RAW * 4, 32], LINEAR)
    key_scale_boxes = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 1, 64], scale_boxes.layout)
    key_scales = view_shared(key_scale_boxes, gl.float32, [STAGES, STEP], LINEAR)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gl.warp_specialize([
        (consume, (q, out, query_start, context_lens, scale_log2, tokens, sequences, tiles, items, queries, staged, keys, key_scales, keys_ready, keys_free,
                   values, values_ready, values_free, 0, HK, GROUP, TILE, SEQUENCES, FP8_SCORES, STAGES)),
        (consume, (q, out, query_start, context_lens, scale_log2, tokens, sequences, tiles, items, queries, staged, keys, key_scales, keys_ready, keys_free,
                   values, values_ready, values_free, 1, HK, GROUP, TILE, SEQUENCES, FP8_SCORES, STAGES)),
        (convert, (query_start, context_lens, tokens, sequences, tiles, items, keys, keys_ready, keys_free, raw_pieces, raw_scale_pieces, raw_ready, raw_free,
                   values, values_ready, values_free, HK, TILE, SEQUENCES, FP8_SCORES, LIMIT, STAGES, RAW, WARPS)),
        (produce, (boxes, scale_boxes, block_table, query_start, context_lens, tokens, sequences, num_blocks, tiles, items,
                   key_boxes, key_scale_boxes, keys_ready, keys_free, raw, raw_scales, raw_ready, raw_free,
                   HK, TILE, SEQUENCES, FP8_SCORES, STAGES, RAW)),
    ], [4, WARPS, 1], REGISTERS)  # fmt: skip


def fits(q: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Does this kernel take these heads and this cache?"""
    heads, dim = q.shape[1:]
    group = heads // kv_cache.shape[1]
    return not INTERPRETED and dim == HEAD_DIM and group <= 32 and group == next_power_of_2(group) and kv_cache.dtype in QUANTIZED_MAX


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    quantize_q: bool,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """As `attention_prefill.launch`, where `fits` says so."""
    tokens, heads, _ = q.shape
    kv_heads, sequences = kv_cache.shape[1], context_lens.shape[0]
    group = heads // kv_heads
    tile = 2 * ROWS.value // group
    tiles = tokens // tile + sequences + 1
    items = tiles * kv_heads
    fp8_scores = quantize_q and kv_cache.dtype == torch.float8_e4m3fn
    boxes, scale_boxes = descriptors(kv_cache, kv_scales)
    prefill_kernel[(min(items, multiprocessors(q.device)),)](
        boxes, scale_boxes, q, block_table, context_lens, query_start, out, softmax_scale * LOG2_E, tokens, sequences, block_table.shape[1], tiles, items,
        HK=kv_heads, GROUP=group, TILE=tile, SEQUENCES=max(32, next_power_of_2(sequences + 1)), FP8_SCORES=fp8_scores,
        LIMIT=QUANTIZED_MAX[kv_cache.dtype], STAGES=3 if fp8_scores else 2, RAW=2 if fp8_scores else 3, WARPS=CONVERTERS, REGISTERS=REGISTERS,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def descriptors(kv_cache: torch.Tensor, kv_scales: torch.Tensor) -> tuple[Any, Any]:
    """TMA descriptors of the cache (64 tokens, 128 bytes) and its scales (64 tokens)."""
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    linear = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    boxes = TensorDescriptor.from_tensor(kv_cache.view(-1, HEAD_DIM), [PAGE_SIZE, 128], swizzled)
    return boxes, TensorDescriptor.from_tensor(kv_scales.view(-1, PAGE_SIZE), [1, PAGE_SIZE], linear)
