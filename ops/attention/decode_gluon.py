"""Decode attention for Hopper in Gluon: head_dim 128, at most 8 query heads per KV head, e4m3, int8 or bf16 cache.

A plain decode kernel is bound by instructions (conversions, reductions across warps, barriers), not by memory.
Therefore warps do not exchange data in the loop: each owns 64 / WARPS tokens of each page (layouts assume a PAGE_SIZE
of 64) and has its own running maximum, sum and output (mma.sync with the warps as a batch dimension). The loop's only
barrier frees a page's buffer. Warps are merged once, at the end. One TMA box of 128 rows loads K and V of a page and
head, a second one their scales; STAGES boxes are in flight. decode_gluon_softmax has the steps of the loop,
decode_gluon_merge the end.

Steps with drafts have up to ROWS rows per sequence; each row sees one token more than the row before it. A program
computes as many rows as fit its 8 or 16 columns (one per row and head); TILES programs, adjacent in the grid, read the
same pages. Sequences with fewer than ROWS rows write to padding rows past the end, so that every row is written once.

With `prefix`, the pages that a sequence shares are left to `prefix_attention`. The first split merges its result, which
it loads while its first pages arrive.

Splits as in `decode`; with a window, of the visible pages. Under PDL all pages except those of the newest tokens are
fetched before the wait, as are lengths and block table, because earlier steps wrote them.

H200, Llama-8B shape, e4m3, CUDA graphs, cold cache, us (fraction of 4.68 TB/s) with PDL: 64 sequences of 1024 tokens
33.3 (89%), 64 x 4096 127.3 (93%), 256 x 512 67.4 (88%), 64 x 256 9.9 (75%); 64 x 1024 in bf16 62.4 (92%).
"""

from typing import Any, NamedTuple, Optional

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.device import multiprocessors
from ..core.gluon_support import cta_barrier, gdc_launch_dependents, gdc_wait, view_shared
from ..core.kv_layout import PAGE_SIZE
from ..core.triton_support import INTERPRETED, cdiv, next_power_of_2
from .decode_gluon_merge import (
    column_range,
    load_prefix,
    merge_prefix,
    merge_splits,
    merge_warps,
    store_result,
    store_rows,
)
from .decode_gluon_softmax import (
    LOWEST,
    attend,
    expect_page,
    fetch_page,
    key_layout,
    key_operand,
    load_queries,
    merge_layout,
    per_token,
    product_layout,
    token_layout,
    value_layout,
)
from .numerics import LOG2_E, split_workspace
from .prefill_gluon_tiles import steps_per_part

HEAD_DIM = 128
COLUMNS = (8, 16)  # of S^T and O^T: the heads of one or several rows


@gluon.jit(do_not_specialize=["num_blocks", "splits", "parts"])
def decode_kernel(
    page_boxes, scale_boxes, q, block_table, context_lens, query_start, out, partial, logsumexp, arrivals, score_scale,
    num_blocks, splits, out_scale, HK: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    TILES: gl.constexpr, COLUMNS: gl.constexpr, BF16: gl.constexpr, SPLIT: gl.constexpr, MIN_PAGES: gl.constexpr,
    WHOLE: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, PADDED: gl.constexpr,
    WINDOW: gl.constexpr, PDL: gl.constexpr, PREFIX: gl.constexpr = False, prefix=None, prefix_lse=None,
    prefix_plan=None, parts=0,
):  # fmt: skip
    """Arguments as in `decode.decode_kernel`, with TMA descriptors of the cache.

    page_boxes [NP * HK * 128, 128], scale_boxes [NP * HK, 128]. With PADDED, out is e4m3 or int8 and out_scale
    [HQ, PADDED] receives one scale per head and row (a head is a block of `quantize_blocks`). PREFIX: prefix and
    prefix_lse have `parts` parts of the shared pages of prefix_plan, which an earlier kernel than the last has written.
    """
    USED: gl.constexpr = G * (ROWS // TILES)  # columns
    tile = gl.program_id(0) % TILES
    program = gl.program_id(0) // TILES
    head = program % HK
    split = (program // HK) % splits
    sequence = program // (HK * splits)
    sequences = gl.num_programs(0) // (TILES * HK * splits)
    length = gl.load(context_lens + sequence)
    if ROWS > 1:
        begin = gl.load(query_start + sequence)
        queries = gl.load(query_start + sequence + 1) - begin
        spare = gl.load(query_start + sequences) + sequence * ROWS - begin - queries
        rows = (tile * (ROWS // TILES), queries, begin, spare)
    else:
        queries = 1
        rows = (0, 1, 0, 0)
    block_table += sequence * num_blocks
    if WINDOW:  # start at the first visible page
        unseen = gl.maximum(length - (queries - 1) - WINDOW, 0) // 64
        length -= unseen * 64
        block_table += unseen
        num_blocks -= unseen
    shared = 0
    if PREFIX:  # start after the shared pages
        shared = gl.load(prefix_plan + sequence)
        length -= shared * 64
        block_table += shared
        num_blocks -= shared
    total_pages = (length + 63) // 64
    chunk = total_pages
    if SPLIT:
        chunk = gl.maximum((total_pages + splits - 1) // splits, MIN_PAGES)
        chunk = gl.where(total_pages <= WHOLE, WHOLE, chunk)  # a merge takes longer than a few pages
    first = split * chunk
    block_table += first
    ids = ()
    for i in gl.static_range(STAGES):  # without splits these loads overlap with that of the length
        ids = ids + (gl.load(block_table + i, mask=first + i < num_blocks, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    next_id = gl.load(block_table + STAGES, mask=first + STAGES < num_blocks, other=0)

    pages = gl.allocate_shared_memory(page_boxes.dtype, [STAGES, 128, 128], page_boxes.layout)
    if BF16:
        scales = pages
    else:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], scale_boxes.layout)
        flat_scales = view_shared(scales, gl.float32, [STAGES * 2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    states = gl.allocate_shared_memory(gl.float32, [2, WARPS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    count = gl.minimum(total_pages - first, chunk)
    if PDL:
        gdc_launch_dependents()
    if ROWS > 1:
        count = gl.where(tile * (ROWS // TILES) < queries, count, 0)
    row = (sequence * HK + head) * TILES + tile  # row of the splits' workspace
    heads = head * (G * 128) if ROWS > 1 else row * G * 128
    out_rows = out + heads
    is_last = (sequence == sequences - 1) & (tile == 0)
    head_scales = out_scale
    if PADDED:
        head_scales = out_scale + head * (G * PADDED)
    if count <= 0:
        if split == 0:
            if PDL:
                gdc_wait()
            nothing = gl.zeros([COLUMNS, 128], gl.float32, gl.SliceLayout(0, merge_layout(WARPS)))
            store_result(
                out_rows, head_scales, rows, sequence, sequences * ROWS, is_last, nothing, G, HK * G, ROWS, USED,
                COLUMNS, WARPS, PADDED, EMPTY=True,
            )  # fmt: skip
        return

    old = count  # pages that earlier steps wrote
    if PDL:
        if ROWS > 1:
            old = gl.minimum(count, gl.maximum(gl.maximum(length - queries, 0) // 64 - first, 0))
        else:
            old = gl.minimum(count, total_pages - 1 - first)
    for i in gl.static_range(STAGES):
        expect_page(ready, i, BF16, i < count)
    for i in gl.static_range(STAGES):
        fetch_page(page_boxes, scale_boxes, pages, scales, ready, i, ids[i] * HK + head, BF16, i < old)
    if PDL:
        gdc_wait()
        if old < gl.minimum(count, STAGES):
            fetch_page(
                page_boxes, scale_boxes, pages, scales, ready, old, gl.load(block_table + old) * HK + head, BF16, True
            )
        if ROWS > 1:  # noqa: SIM102
            if old + 1 < gl.minimum(count, STAGES):  # drafts may start a page
                new_id = gl.load(block_table + old + 1)
                fetch_page(
                    page_boxes, scale_boxes, pages, scales, ready, old + 1, new_id * HK + head, BF16, True
                )  # fmt: skip
    if PREFIX:
        share = steps_per_part(shared // 2, parts)
        count_parts = gl.where(split == 0, (shared // 2 + share - 1) // share, 0)
        first_row = sequence * (HK * G) + head * G
        loaded = load_prefix(
            prefix, prefix_lse, count_parts, first_row, sequences * (HK * G), USED, COLUMNS, WARPS
        )  # fmt: skip
    q_transposed = load_queries(q + heads, rows, score_scale, G, HK * G, ROWS, USED, COLUMNS, WARPS, BF16)
    PRODUCT: gl.constexpr = product_layout(WARPS)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    acc = gl.zeros([WARPS, 128, COLUMNS], gl.float32, PRODUCT)
    top = gl.full([WARPS, COLUMNS], LOWEST, gl.float32, BY_COLUMN)
    no_scores = gl.zeros([WARPS, 64 // WARPS, COLUMNS], gl.float32, PRODUCT)
    total = gl.sum(gl.reshape(no_scores, [WARPS, 8 // WARPS, 8, COLUMNS]), 1)
    token = per_token(gl.arange(0, 64, token_layout(WARPS)), WARPS)
    remaining = length - first * 64
    if ROWS > 1:
        column_row = rows[0] + gl.arange(0, COLUMNS, gl.SliceLayout(0, BY_COLUMN)) // G
        seen_by = gl.where(column_row < queries, remaining - queries + 1 + column_row, 0)
        seen_by = seen_by[None, :] + gl.zeros([WARPS, COLUMNS], gl.int32, BY_COLUMN)
    slot = 0
    phase = 0
    for i in range(count):
        mbarrier.wait(ready.index(slot), phase)
        refill = i + STAGES < count
        expect_page(ready, slot, BF16, refill)
        page = pages.index(slot)
        k = page.slice(0, 64).load(key_layout(WARPS, BF16))
        v = page.slice(64, 64).load(value_layout(WARPS, BF16))
        if BF16:
            scores = mma_v2(
                key_operand(k, WARPS, BF16), q_transposed, gl.zeros([WARPS, 64 // WARPS, COLUMNS], gl.float32, PRODUCT)
            )
            scores = scores * score_scale
            v_scale = token
        else:
            k_scale = per_token(flat_scales.index(slot * 2).load(token_layout(WARPS)), WARPS)
            v_scale = per_token(flat_scales.index(slot * 2 + 1).load(token_layout(WARPS)), WARPS)
            scores = mma_v2(
                key_operand(k, WARPS, BF16), q_transposed, gl.zeros([WARPS, 64 // WARPS, COLUMNS], gl.float32, PRODUCT)
            )
            scores = scores * k_scale[:, :, None]
        fence_async_shared()  # a barrier does not complete loads
        cta_barrier()  # every warp has read the slot
        fetch_page(page_boxes, scale_boxes, pages, scales, ready, slot, next_id * HK + head, BF16, refill)
        next_id = gl.load(block_table + i + STAGES + 1, mask=i + STAGES + 1 < count, other=0)
        if ROWS > 1:
            end, at = (seen_by - i * 64)[:, None, :], token[:, :, None]
        else:
            end, at = remaining - i * 64, token[:, :, None]
        seen = at < end
        if WINDOW:
            seen = seen & (at >= end - WINDOW)
        top, total, acc = attend(scores, v, v_scale, top, total, acc, seen, COLUMNS, WARPS, BF16)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    # page buffers are free now
    outputs = view_shared(pages, gl.float32, [WARPS, COLUMNS, 128], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
    o, lse = merge_warps(acc, top, total, outputs, states, ROWS, COLUMNS, WARPS, BF16)
    if PREFIX:
        o, lse = merge_prefix(o, lse, loaded)
    if SPLIT:
        active = (total_pages + chunk - 1) // chunk
        if active > 1:
            at = (row * splits + split) * USED
            column = column_range(COLUMNS, WARPS)
            store_rows(partial + at * 128, column, o, USED, COLUMNS, WARPS)
            gl.store(logsumexp + at + column, lse, mask=column < USED)
            cta_barrier()  # all threads have written before the arrival is counted
            if gl.atomic_add(arrivals + row, 1, sem="acq_rel") == active - 1:
                gl.store(arrivals + row, 0)
                merged = merge_splits(partial, logsumexp, row * splits, active, USED, GROUP, WARPS, STEP)
                store_result(
                    out_rows, head_scales, rows, sequence, sequences * ROWS, is_last, merged, G, HK * G, ROWS, USED,
                    GROUP, WARPS, PADDED,
                )  # fmt: skip
        else:
            store_result(
                out_rows, head_scales, rows, sequence, sequences * ROWS, is_last, o, G, HK * G, ROWS, USED, COLUMNS,
                WARPS, PADDED,
            )  # fmt: skip
    else:
        store_result(
            out_rows, head_scales, rows, sequence, sequences * ROWS, is_last, o, G, HK * G, ROWS, USED, COLUMNS, WARPS,
            PADDED,
        )  # fmt: skip


def fits(q: torch.Tensor, kv_cache: torch.Tensor, rows: int = 1) -> bool:
    """Return whether this kernel supports these heads, this cache and `rows` rows per sequence."""
    heads, dim = q.shape[1:]
    return (
        not INTERPRETED
        and dim == HEAD_DIM
        and heads // kv_cache.shape[1] <= COLUMNS[0]
        and kv_cache.dtype in (torch.float8_e4m3fn, torch.int8, torch.bfloat16)
        and rows == next_power_of_2(rows)
    )


def columns_of(group: int, rows: int) -> tuple[int, int]:
    """Return (columns, rows per program) for `rows` rows, a power of two, of `group` heads."""
    columns = next(size for size in COLUMNS if size >= min(rows * group, COLUMNS[-1]))
    return columns, min(rows, 1 << (columns // group).bit_length() - 1)


class Tiling(NamedTuple):
    """Warps and page buffers per program, splits per sequence, and limits of splitting.

    min_pages  minimum pages of a split
    whole      maximum pages of a sequence that is not split
    """

    warps: int
    stages: int
    splits: int
    min_pages: int
    whole: int


def tiling(rows: int, num_blocks: int, wide: bool, device: torch.device, columns: int = COLUMNS[0]) -> Tiling:
    """Return the tiling for `rows` (sequence, kv head) pairs, or tiles of these, of unknown length.

    With two warps and three buffers an SM runs four programs. This saturates the memory, and no SM becomes empty early:
    under PDL the next kernel's programs would all start there. If there are fewer rows than programs fit, splits fill
    the SMs; this also balances different lengths (16 sequences of 64..8192 tokens: 32 us instead of 57). If rows fill
    the GPU, only a wide table indicates long sequences: sequences of more than 16 pages are then split, so that the
    longest do not finish alone. Very few rows get larger programs: two per SM, or one if the cache is `wide` (16 bits),
    since its buffers fill the SM. Then sequences of up to four pages are not split, because merging takes longer. 16
    columns need the registers of four warps: three programs per SM.
    """
    processors = multiprocessors(device)
    if columns > COLUMNS[0]:
        few = 4 * rows <= processors
        splits = min(num_blocks // (2 if few else 4), (1 if wide and few else 2 if few else 3) * processors // rows)
        return Tiling(4, 6 if few else 3, max(1, splits), 2 if few else 4, 4)
    if rows > 8 * processors:
        return Tiling(2, 3, 1, 1, 1)
    if rows > 2 * processors:
        return Tiling(2, 3, max(1, min(num_blocks // 32, 4)), 16, 16)
    if 4 * rows > processors:
        return Tiling(2, 3, max(1, min(num_blocks // 4, 4 * processors // rows)), 4, 4)
    return Tiling(4, 6, max(1, min(num_blocks // 2, (1 if wide else 2) * processors // rows)), 2, 4)


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    pdl: bool,
    window: int = 0,
    out_scale: Optional[torch.Tensor] = None,
    query_start: Optional[torch.Tensor] = None,
    rows: int = 1,
    prefix: Optional[tuple[torch.Tensor, ...]] = None,
) -> None:
    """Run this file's kernel, if `fits`; arguments as in `decode.launch`.

    With `out_scale` [HQ, P] the result is quantized per head: out [T, HQ * 128] is e4m3 or int8.
    """
    sequences, kv_heads, num_blocks = context_lens.shape[0], kv_cache.shape[1], block_table.shape[1]
    group = q.shape[1] // kv_heads
    columns, tile_rows = columns_of(group, rows)
    tiles = cdiv(rows, tile_rows)
    pairs, used = sequences * kv_heads * tiles, tile_rows * group
    warps, stages, splits, min_pages, whole = tiling(pairs, num_blocks, kv_scales is None, q.device, columns)
    partial, logsumexp, arrivals = split_workspace(q.device, pairs, splits, used, HEAD_DIM)
    page_boxes, scale_boxes = descriptors(kv_cache, kv_scales)
    padded = next_power_of_2(used)
    shared: dict[str, Any] = {}
    if prefix is not None:
        shared = dict(zip(("prefix", "prefix_lse", "prefix_plan"), prefix, strict=True))
        shared |= {"PREFIX": True, "parts": prefix[0].shape[0]}
    decode_kernel[pairs * splits,](
        page_boxes, scale_boxes, q, block_table, context_lens, context_lens if query_start is None else query_start,
        out, partial, logsumexp, arrivals, softmax_scale * LOG2_E, num_blocks, splits, out_scale, HK=kv_heads, G=group,
        GROUP=padded, ROWS=rows, TILES=tiles, COLUMNS=columns, BF16=kv_scales is None, SPLIT=splits > 1,
        MIN_PAGES=min_pages, WHOLE=whole, STEP=8 * warps if rows == 1 else max(8, 32 * warps // padded), STAGES=stages,
        WARPS=warps, PADDED=0 if out_scale is None else out_scale.shape[1], WINDOW=window, PDL=pdl,
        num_warps=warps, launch_pdl=pdl, **shared,
    )  # fmt: skip


def descriptors(kv_cache: torch.Tensor, kv_scales: Optional[torch.Tensor]) -> tuple[Any, Any]:
    """Return TMA descriptors of the cache and its scales; a captured graph stores them by value."""
    bits = 8 * kv_cache.element_size()
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    page_boxes = TensorDescriptor.from_tensor(kv_cache.view(-1, HEAD_DIM), [2 * PAGE_SIZE, HEAD_DIM], swizzled)
    if kv_scales is None:
        return page_boxes, None
    linear = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return page_boxes, TensorDescriptor.from_tensor(kv_scales.view(-1, 2 * PAGE_SIZE), [1, 2 * PAGE_SIZE], linear)
