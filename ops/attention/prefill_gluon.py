"""Attention of query chunks over an 8-bit paged cache for Hopper in Gluon.

head_dim 128, 1 to 32 query heads per KV head (powers of two). A program has specialised warps. One warp copies pages to
shared memory by TMA. Four warps convert operands that the tensor cores do not support to fp16, scale included: V, and
also K unless Q K^T is computed in e4m3. Two groups of four warps each own 64 of the tile's 128 rows (row = token *
group + head) and share every page; Q and P stay in registers, so a product reads shared memory once, unless Q has 16
bits. Within a group, the product P V of one step (two pages) overlaps with the softmax of the next step.

Programs are persistent, one per SM; tiles are distributed from longest to shortest, in alternating directions. Tiles
find their sequence as in prefill.py. Pages are read from newest to oldest, so only the first steps have causal masks,
and an odd last page, which is copied twice.
"""

from typing import Any, Optional

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.device import multiprocessors
from ..core.dtypes import QUANTIZED_MAX
from ..core.gluon_support import gdc_launch_dependents, gdc_wait, tma_load, view_shared
from ..core.kv_layout import PAGE_SIZE
from ..core.triton_support import INTERPRETED, cdiv, next_power_of_2
from .numerics import LOG2_E, split_workspace
from .prefill_gluon_softmax import consume, converter_layout, fetch, widen
from .prefill_gluon_tiles import PREFIXES, ROWS, SPLIT_TILES, STEP, find_tile, item_of, plan_splits, rounds
from .widen_kv import NARROW_TILES, WIDENED

HEAD_DIM = 128
# registers per thread: the second row group (the first gets as many), the converters, the copier
REGISTERS = (224, 40, 24)
CONVERTERS = 4  # warps
MIN_STEPS = 4  # of a split: 512 keys
MOST_TILES = 2  # per SM; with more, programs have enough work without splits


@gluon.jit
def produce(
    boxes, scale_boxes, block_table, num_blocks, batch, keys, key_scales, keys_ready, keys_free, raw, raw_scales,
    raw_ready, raw_free, HK: gl.constexpr, TILE: gl.constexpr, PLANNED: gl.constexpr,
    FP8_SCORES: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr,
    WINDOW: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Copy pages (producer warp)."""
    BYTES: gl.constexpr = STEP * 132  # with the scales
    step = 0
    items, count = rounds(batch, HK)
    for number in range(count):
        item = item_of(number)
        if item < items:
            head, sequence, _first_token, _end, position, length, steps, _whole, skipped, _split = find_tile(
                item, batch, HK, TILE, PLANNED, 1, WINDOW, SPLIT
            )
            table = block_table + sequence * num_blocks
            if WINDOW or SPLIT:
                table += skipped * 2
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
                        tma_load(scale_boxes, [first + which, 0], ready, raw_scales.index(slot * 2))
                        tma_load(scale_boxes, [second + which, 0], ready, raw_scales.index(slot * 2 + 1))
                    else:
                        slot = step % STAGES
                        mbarrier.wait(keys_free.index(slot), (step // STAGES & 1) ^ 1)
                        ready = keys_ready.index(slot)
                        mbarrier.expect(ready, BYTES)
                        fetch(boxes, keys, ready, slot, first * 64, second * 64)
                        tma_load(scale_boxes, [first, 0], ready, key_scales.index(slot * 2))
                        tma_load(scale_boxes, [second, 0], ready, key_scales.index(slot * 2 + 1))
                step += 1


@gluon.jit
def convert_tile(
    raw, raw_scales, raw_ready, raw_free, n, target, ready, free, step, LIMIT: gl.constexpr, STAGES: gl.constexpr,
    RAW: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Convert tile `n` of the 8-bit ring to fp16, times 16 times the scales, into the stage of `step`.

    LIMIT: the largest value of the cache's dtype; STAGES, RAW: stages of the fp16 and the 8-bit ring.
    """
    PIECE: gl.constexpr = 32
    LAYOUT: gl.constexpr = converter_layout(WARPS)
    slot = n % RAW
    goal = step % STAGES
    mbarrier.wait(raw_ready.index(slot), n // RAW & 1)
    mbarrier.wait(free.index(goal), (step // STAGES & 1) ^ 1)
    for i in gl.static_range(STEP // PIECE):
        x = raw.index(slot * (STEP // PIECE) + i).load(LAYOUT)
        scale = raw_scales.index(slot * (STEP // PIECE) + i).load(gl.SliceLayout(1, LAYOUT))
        scale = gl.minimum(scale * WIDENED, 65440.0 / LIMIT)  # even rounded up to fp16, no product overflows
        pair = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [scale], dtype=gl.int32, is_pure=True, pack=1
        )
        target.index(goal).slice(i * PIECE, PIECE).store(widen(x, pair[:, None]))
    fence_async_shared()
    mbarrier.arrive(ready.index(goal), count=1)
    mbarrier.arrive(raw_free.index(slot), count=1)


@gluon.jit
def convert(
    batch, keys, keys_ready, keys_free, raw, raw_scales, raw_ready, raw_free, values, values_ready, values_free,
    HK: gl.constexpr, TILE: gl.constexpr, PLANNED: gl.constexpr, FP8_SCORES: gl.constexpr,
    LIMIT: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr, WARPS: gl.constexpr,
    WINDOW: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Convert the cache to fp16 (converter warps)."""
    step = 0
    items, count = rounds(batch, HK)
    for number in range(count):
        item = item_of(number)
        if item < items:
            _head, _sequence, _first_token, _end, _position, _length, steps, _whole, _skipped, _split = find_tile(
                item, batch, HK, TILE, PLANNED, WARPS, WINDOW, SPLIT
            )
            for _j in range(steps):
                if FP8_SCORES:
                    convert_tile(
                        raw, raw_scales, raw_ready, raw_free, step, values, values_ready, values_free, step, LIMIT,
                        STAGES, RAW, WARPS,
                    )  # fmt: skip
                else:
                    convert_tile(
                        raw, raw_scales, raw_ready, raw_free, step * 2, keys, keys_ready, keys_free, step, LIMIT,
                        STAGES, RAW, WARPS,
                    )  # fmt: skip
                    convert_tile(
                        raw, raw_scales, raw_ready, raw_free, step * 2 + 1, values, values_ready, values_free, step,
                        LIMIT, STAGES, RAW, WARPS,
                    )  # fmt: skip
                step += 1


@gluon.jit(do_not_specialize=["tokens", "sequences", "num_blocks", "tiles", "min_steps", "parts"])
def prefill_kernel(
    boxes, scale_boxes, q, block_table, context_lens, query_start, plan, out, partial, logsumexp, arrivals, scale_log2,
    tokens, sequences, num_blocks, tiles, min_steps, parts, HK: gl.constexpr, GROUP: gl.constexpr, TILE: gl.constexpr,
    PLANNED: gl.constexpr, FP8_SCORES: gl.constexpr, LIMIT: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr,
    WARPS: gl.constexpr, REGISTERS: gl.constexpr, WINDOW: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute tiles in a persistent program, with specialised warps.

    q, out [T, HK * GROUP, 128]; boxes [NP * HK * 128, 128] and scale_boxes [NP * HK * 2, 64] are TMA descriptors of
    64 x 128 bytes and of 1 x 64 scales. PLANNED: only sequences that `plan` leaves in 8 bits, after prefill_wide_gluon.
    With PDL that kernel launches this one after all earlier kernels are done. This one runs during that kernel's last
    tiles and waits for it at its end. SPLIT_TILES: tiles are split as in `plan_splits`, into splits of at least
    min_steps steps, and merged in partial, logsumexp and arrivals (`exchange_splits`). PREFIXES: `parts` parts of each
    prefix of `prefix_plan` (plan) are stored to partial and logsumexp (`store_part`); out is not written. Then only the
    consumers wait for the earlier kernel: earlier steps have written the pages, and the plan is complete at the start.
    """
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
    # results of a tile before the store; before that its queries, if 16-bit
    staged = gl.allocate_shared_memory(OUT, [2, ROWS, 128], WIDE)
    queries = view_shared(staged, gl.float16, [2, ROWS, 128], WIDE)
    if FP8_SCORES:  # keys are multiplied without conversion
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
    begins = plan
    chunk = parts
    if SPLIT == SPLIT_TILES:
        counted = (query_start, context_lens, plan, tokens, sequences)
        tiles, chunk = plan_splits(counted, min_steps, HK, TILE, PLANNED, 4)
    if SPLIT == 0:
        begins = plan + NARROW_TILES * (sequences + 1)
        if PLANNED:
            tiles = gl.load(begins + sequences)
    if PDL:  # noqa: SIM102
        if not PLANNED and SPLIT != PREFIXES:
            gdc_wait()
    batch = (query_start, context_lens, begins, tokens, sequences, tiles, chunk)
    planes = (partial, logsumexp, arrivals)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    q,
                    out,
                    batch,
                    scale_log2,
                    queries,
                    staged,
                    keys,
                    key_scales,
                    keys_ready,
                    keys_free,
                    values,
                    values_ready,
                    values_free,
                    keys_free,
                    0,
                    HK,
                    GROUP,
                    TILE,
                    PLANNED,
                    FP8_SCORES,
                    False,
                    STAGES,
                    False,
                    WINDOW,
                    SPLIT,
                    planes,
                ),
            ),
            (
                consume,
                (
                    q,
                    out,
                    batch,
                    scale_log2,
                    queries,
                    staged,
                    keys,
                    key_scales,
                    keys_ready,
                    keys_free,
                    values,
                    values_ready,
                    values_free,
                    keys_free,
                    1,
                    HK,
                    GROUP,
                    TILE,
                    PLANNED,
                    FP8_SCORES,
                    False,
                    STAGES,
                    False,
                    WINDOW,
                    SPLIT,
                    planes,
                ),
            ),
            (
                convert,
                (
                    batch,
                    keys,
                    keys_ready,
                    keys_free,
                    raw_pieces,
                    raw_scale_pieces,
                    raw_ready,
                    raw_free,
                    values,
                    values_ready,
                    values_free,
                    HK,
                    TILE,
                    PLANNED,
                    FP8_SCORES,
                    LIMIT,
                    STAGES,
                    RAW,
                    WARPS,
                    WINDOW,
                    SPLIT,
                ),
            ),
            (
                produce,
                (
                    boxes,
                    scale_boxes,
                    block_table,
                    num_blocks,
                    batch,
                    key_boxes,
                    key_scale_boxes,
                    keys_ready,
                    keys_free,
                    raw,
                    raw_scales,
                    raw_ready,
                    raw_free,
                    HK,
                    TILE,
                    PLANNED,
                    FP8_SCORES,
                    STAGES,
                    RAW,
                    WINDOW,
                    SPLIT,
                ),
            ),
        ],
        [4, WARPS, 1],
        REGISTERS,
    )
    if PDL and PLANNED:
        gdc_wait()


def takes_heads(heads: int, kv_heads: int, dim: int) -> bool:
    """Return whether this kernel supports these numbers of heads and this head_dim."""
    group = heads // kv_heads
    return dim == HEAD_DIM and group <= 32 and group == next_power_of_2(group)


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Return the tokens per tile, which has 128 rows: one per token and query head of a KV head."""
    return 2 * int(ROWS) // (heads // kv_heads)


def fits(q: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Return whether this kernel supports these heads and this cache."""
    return (
        not INTERPRETED and takes_heads(q.shape[1], kv_cache.shape[1], q.shape[2]) and kv_cache.dtype in QUANTIZED_MAX
    )


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
    plan: Optional[torch.Tensor] = None,
    window: int = 0,
    split: bool = True,
) -> None:
    """Run the kernel, if `fits`; arguments as in `prefill.launch`.

    `plan`: compute only the sequences that `widen_plan` leaves in 8 bits. `split`: divide the context of few tiles
    among programs where `splits_tiles` allows it; without, a row's bits do not depend on other sequences.
    """
    tokens, heads, _ = q.shape
    kv_heads, sequences = kv_cache.shape[1], context_lens.shape[0]
    tile, programs = tile_tokens(heads, kv_heads), multiprocessors(q.device)
    tiles = tokens // tile + sequences + 1
    fp8_scores = quantize_q and kv_cache.dtype == torch.float8_e4m3fn
    boxes, scale_boxes = descriptors(kv_cache, kv_scales)
    split = split and not window and splits_tiles(cdiv(tokens, tile) * kv_heads, block_table.shape[1], q.device)
    planes: tuple[torch.Tensor, ...] = (query_start,) * 3
    if split:  # two groups of rows per program
        planes = split_workspace(q.device, 2 * programs, 1, int(ROWS), HEAD_DIM, "attention_prefill")
    else:
        programs = min(tiles * kv_heads, programs)
    prefill_kernel[programs,](
        boxes, scale_boxes, q, block_table, context_lens, query_start, query_start if plan is None else plan, out,
        *planes, softmax_scale * LOG2_E, tokens, sequences, block_table.shape[1], tiles, MIN_STEPS, 0, HK=kv_heads,
        GROUP=heads // kv_heads, TILE=tile, PLANNED=plan is not None, FP8_SCORES=fp8_scores,
        LIMIT=QUANTIZED_MAX[kv_cache.dtype], STAGES=3 if fp8_scores else 2, RAW=2 if fp8_scores else 3,
        WARPS=CONVERTERS, REGISTERS=REGISTERS, WINDOW=window, SPLIT=int(SPLIT_TILES) if split else 0, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def splits_tiles(tiles: int, num_blocks: int, device: torch.device) -> bool:
    """Return whether a launch with at least `tiles` pairs of a tile and a KV head may split tiles.

    Depends on the number of rows but not of sequences, so that programs of few sequences launch all kernels.
    """
    return tiles <= MOST_TILES * multiprocessors(device) and num_blocks * PAGE_SIZE > MIN_STEPS * int(STEP)


def descriptors(kv_cache: torch.Tensor, kv_scales: torch.Tensor) -> tuple[Any, Any]:
    """Return TMA descriptors of the cache (64 tokens, 128 bytes) and its scales (64 tokens)."""
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    linear = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    boxes = TensorDescriptor.from_tensor(kv_cache.view(-1, HEAD_DIM), [PAGE_SIZE, 128], swizzled)
    return boxes, TensorDescriptor.from_tensor(kv_scales.view(-1, PAGE_SIZE), [1, PAGE_SIZE], linear)
