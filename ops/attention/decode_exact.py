"""Decode attention whose bits do not depend on the batch: head_dim 128, at most 8 query heads per KV head, 8-bit cache.

The kernel of `decode_gluon` divides a sequence by the number of sequences, and merges what results. Here a sequence has
chunks of a fixed number of pages, counted from its first visible one. Each chunk has its own maximum, sum and output,
which are merged in ascending order. A program computes every `splits`-th chunk, so that the batch decides only which
program computes a chunk. Warps, columns and the chunks merged at a time are constants too: sums depend on them.

The last program of a sequence to finish merges its chunks. A sequence of one chunk is stored at once. Under PDL a
program fetches the pages of its first chunk before the wait, as in `decode_gluon`.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..core.gluon_support import cta_barrier, gdc_launch_dependents, gdc_wait, view_shared
from ..core.triton_support import cdiv, next_power_of_2
from .decode_gluon import COLUMNS, HEAD_DIM, descriptors, tiling
from .decode_gluon_merge import column_range, merge_splits, merge_warps, store_result, store_rows
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
from .numerics import LOG2_E, chunk_pages, split_workspace

WARPS, STAGES = 2, 3  # four programs per SM
MERGED = 16  # chunks merged at a time


@gluon.jit(do_not_specialize=["num_blocks", "splits", "chunks"])
def decode_exact_kernel(
    page_boxes, scale_boxes, q, block_table, context_lens, out, partial, logsumexp, arrivals, score_scale, num_blocks,
    splits, chunks, HK: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, COLUMNS: gl.constexpr, CHUNK: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, WINDOW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute the chunks split, split + splits, ... of one sequence and kv head; merge them if it ends last.

    Arguments as in `decode_gluon.decode_kernel`; `partial` and `logsumexp` have room for `chunks` chunks of a row.
    """
    head = gl.program_id(0) % HK
    split = (gl.program_id(0) // HK) % splits
    sequence = gl.program_id(0) // (HK * splits)
    length = gl.load(context_lens + sequence)
    block_table += sequence * num_blocks
    if WINDOW:  # start at the first visible page
        unseen = gl.maximum(length - WINDOW, 0) // 64
        length -= unseen * 64
        block_table += unseen
    total_pages = (length + 63) // 64
    active = (total_pages + CHUNK - 1) // CHUNK

    pages = gl.allocate_shared_memory(page_boxes.dtype, [STAGES, 128, 128], page_boxes.layout)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], scale_boxes.layout)
    flat_scales = view_shared(scales, gl.float32, [STAGES * 2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    states = gl.allocate_shared_memory(gl.float32, [2, WARPS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    rows = (0, 1, 0, 0)
    row = sequence * HK + head
    out_rows = out + row * G * 128
    if split >= active:
        if split == 0:
            if PDL:
                gdc_wait()
            nothing = gl.zeros([COLUMNS, 128], gl.float32, gl.SliceLayout(0, merge_layout(WARPS)))
            store_result(out_rows, out, rows, 0, 0, False, nothing, G, HK * G, 1, G, COLUMNS, WARPS, 0)
        return

    # the first chunk: earlier steps wrote all pages but the newest token's
    table = block_table + split * CHUNK
    count = gl.minimum(total_pages - split * CHUNK, CHUNK)
    old = gl.minimum(count, total_pages - 1 - split * CHUNK) if PDL else count
    for ahead in gl.static_range(STAGES):
        page_id = gl.load(table + ahead, mask=ahead < count, other=0)
        expect_page(ready, ahead, False, ahead < count)
        fetch_page(page_boxes, scale_boxes, pages, scales, ready, ahead, page_id * HK + head, False, ahead < old)
    if PDL:
        gdc_wait()
        if old < gl.minimum(count, STAGES):
            page_id = gl.load(table + old)
            fetch_page(page_boxes, scale_boxes, pages, scales, ready, old, page_id * HK + head, False, True)
    q_transposed = load_queries(q + row * G * 128, rows, score_scale, G, HK * G, 1, G, COLUMNS, WARPS, False)
    PRODUCT: gl.constexpr = product_layout(WARPS)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    token = per_token(gl.arange(0, 64, token_layout(WARPS)), WARPS)
    column = column_range(COLUMNS, WARPS)
    slot = 0
    phase = 0
    for chunk in range(split, active, splits):
        table = block_table + chunk * CHUNK
        count = gl.minimum(total_pages - chunk * CHUNK, CHUNK)
        remaining = length - chunk * (CHUNK * 64)
        at = slot
        for ahead in gl.static_range(STAGES):
            wanted = (ahead < count) & (chunk > split)
            page_id = gl.load(table + ahead, mask=wanted, other=0)
            expect_page(ready, at, False, wanted)
            fetch_page(page_boxes, scale_boxes, pages, scales, ready, at, page_id * HK + head, False, wanted)
            at = gl.where(at == STAGES - 1, 0, at + 1)
        next_id = gl.load(table + STAGES, mask=count > STAGES, other=0)
        acc = gl.zeros([WARPS, 128, COLUMNS], gl.float32, PRODUCT)
        top = gl.full([WARPS, COLUMNS], LOWEST, gl.float32, BY_COLUMN)
        no_scores = gl.zeros([WARPS, 64 // WARPS, COLUMNS], gl.float32, PRODUCT)
        total = gl.sum(gl.reshape(no_scores, [WARPS, 8 // WARPS, 8, COLUMNS]), 1)
        for block in range(count):
            mbarrier.wait(ready.index(slot), phase)
            refill = block + STAGES < count
            expect_page(ready, slot, False, refill)
            page = pages.index(slot)
            k = page.slice(0, 64).load(key_layout(WARPS, False))
            v = page.slice(64, 64).load(value_layout(WARPS, False))
            k_scale = per_token(flat_scales.index(slot * 2).load(token_layout(WARPS)), WARPS)
            v_scale = per_token(flat_scales.index(slot * 2 + 1).load(token_layout(WARPS)), WARPS)
            no_scores = gl.zeros([WARPS, 64 // WARPS, COLUMNS], gl.float32, PRODUCT)
            scores = mma_v2(key_operand(k, WARPS, False), q_transposed, no_scores) * k_scale[:, :, None]
            fence_async_shared()  # a barrier does not complete loads
            cta_barrier()  # every warp has read the slot
            fetch_page(page_boxes, scale_boxes, pages, scales, ready, slot, next_id * HK + head, False, refill)
            next_id = gl.load(table + block + STAGES + 1, mask=block + STAGES + 1 < count, other=0)
            end = remaining - block * 64
            seen = token[:, :, None] < end
            if WINDOW:
                seen = seen & (token[:, :, None] >= end - WINDOW)
            top, total, acc = attend(scores, v, v_scale, top, total, acc, seen, COLUMNS, WARPS, False)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        # page buffers are free now
        outputs = view_shared(pages, gl.float32, [WARPS, COLUMNS, 128], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
        o, lse = merge_warps(acc, top, total, outputs, states, 1, COLUMNS, WARPS, False)
        if active > 1:
            place = (row * chunks + chunk) * G
            store_rows(partial + place * 128, column, o, G, COLUMNS, WARPS)
            gl.store(logsumexp + place + column, lse, mask=column < G)
        else:
            store_result(out_rows, out, rows, 0, 0, False, o, G, HK * G, 1, G, COLUMNS, WARPS, 0)
        fence_async_shared()
        cta_barrier()  # every warp has read `outputs` and written its part of `partial`
    if active > 1:  # noqa: SIM102
        if gl.atomic_add(arrivals + row, 1, sem="acq_rel") == gl.minimum(active, splits) - 1:
            gl.store(arrivals + row, 0)
            merged = merge_splits(partial, logsumexp, row * chunks, active, G, GROUP, WARPS, STEP)
            store_result(out_rows, out, rows, 0, 0, False, merged, G, HK * G, 1, G, GROUP, WARPS, 0)


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    pdl: bool,
    window: int = 0,
) -> None:
    """Run the kernel; arguments as in `decode.launch`, for one row per sequence."""
    kv_heads, num_blocks = kv_cache.shape[1], block_table.shape[1]
    group, pairs = q.shape[1] // kv_heads, context_lens.shape[0] * kv_heads
    pages = chunk_pages(num_blocks)
    chunks = cdiv(num_blocks, pages)
    splits = min(chunks, tiling(pairs, num_blocks, False, q.device).splits)
    page_boxes, scale_boxes = descriptors(kv_cache, kv_scales)
    decode_exact_kernel[pairs * splits,](
        page_boxes, scale_boxes, q, block_table, context_lens, out,
        *split_workspace(q.device, pairs, chunks, group, HEAD_DIM), softmax_scale * LOG2_E, num_blocks, splits, chunks,
        HK=kv_heads, G=group, GROUP=next_power_of_2(group), COLUMNS=COLUMNS[0], CHUNK=pages, STEP=MERGED, STAGES=STAGES,
        WARPS=WARPS, WINDOW=window, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
