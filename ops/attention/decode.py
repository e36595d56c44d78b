"""Decode attention in Triton: one query row per sequence, or a few with drafts; head_dim 64 or 128, any cache dtype.

A program owns one (sequence, kv head, split) and loops over its pages, one page of 64 tokens per step. Products are
transposed, S^T = K Q^T and O^T = V^T P^T: pages are the tall operand of the tensor cores, and the few query heads of a
group, for all rows of the sequence, are the narrow one (padded to 16). Each row sees one token more than the row before
it. Sequences with fewer than ROWS rows write to padding rows past the end, so that every row is written once.

A sequence's pages are divided evenly among its splits on the device, because lengths change under a captured graph.
With a window, a sequence starts at the first page that its first row sees. Splits without pages return at once. The
last split to arrive merges all of them in order, so results are bitwise repeatable.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors
from ..core.kv_layout import PAGE_SIZE
from ..core.triton_support import INTERPRETED, cdiv, dot_ieee, next_power_of_2, pdl_start
from . import decode_exact, decode_gluon
from .numerics import LOG2_E, LOWEST, PROBABILITY_SCALE, chunk_pages, operand_type, split_workspace

MAX_SPLITS = 64
MOST_COLUMNS = 64
MIN_SPLIT_PAGES = 2


@triton.jit
def merge_splits(
    partial, logsumexp, row, active, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr
):
    """Merge splits row..row + active of one (sequence, kv head), [G, D] each, in ascending order -> [GROUP, D] fp32."""
    split = tl.arange(0, STEP)
    group = tl.arange(0, GROUP)
    dim = tl.arange(0, D)
    top = tl.full([GROUP], LOWEST, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    merged = tl.zeros([GROUP, D], tl.float32)
    for first in range(0, active, STEP):
        at = (row + first + split)[:, None] * G + group[None, :]
        there = (first + split < active)[:, None] & (group < G)[None, :]
        lse = tl.load(logsumexp + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        part = tl.load(
            partial + at[:, :, None] * D + dim[None, None, :], mask=there[:, :, None], other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        keep = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top[None, :])
        total = total * keep + tl.sum(weight, 0)
        merged = merged * keep[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = new_top
    return merged / tl.where(group < G, total, 1.0)[:, None]


@triton.jit
def _columns(column, sequence, head, sequences, length, query_start, HK: tl.constexpr, G: tl.constexpr,
             ROWS: tl.constexpr):  # fmt: skip
    """Return (row of q and out [T * HK * G, D], number of visible tokens) of each column: a row and head."""
    if ROWS == 1:
        return (sequence.to(tl.int64) * HK + head) * G + column, tl.zeros_like(column) + length
    else:
        begin = tl.load(query_start + sequence)
        count = tl.load(query_start + sequence + 1) - begin
        spare = tl.load(query_start + sequences) + sequence * ROWS - begin - count
        row = column // G
        token = tl.where(row < count, begin + row, spare + row)
        return (token.to(tl.int64) * HK + head) * G + column % G, tl.where(row < count, length - count + 1 + row, 0)


@triton.jit(do_not_specialize=["num_blocks", "splits"])
def decode_kernel(
    q, cache, scales, block_table, context_lens, query_start, out, partial, logsumexp, arrivals, scale_log2, num_blocks,
    splits, HK: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, USED: tl.constexpr, GROUP: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, OPERAND: tl.constexpr, QUANTIZED: tl.constexpr,
    SPLIT: tl.constexpr, MIN_PAGES: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one split of a sequence and kv head; the last program of these merges the splits.

    q, out       [B * ROWS, HK * G, D]; USED = ROWS * G
    query_start  [B + 1], not read if ROWS is 1
    partial, logsumexp  [B * HK * splits, USED, D] and [B * HK * splits, USED] fp32 (log2 units)
    arrivals     [B * HK] int32, zero
    MIN_PAGES    least pages of a split
    WINDOW       newest tokens that a row sees; 0: all
    """
    pdl_start(PDL)
    program = tl.program_id(0)
    head = program % HK
    split = program // HK % splits
    sequence = program // (HK * splits)
    length = tl.load(context_lens + sequence)
    if WINDOW:  # start at the first visible page
        reach = length - WINDOW
        if ROWS > 1:
            reach -= tl.load(query_start + sequence + 1) - tl.load(query_start + sequence) - 1
        unseen = tl.maximum(reach, 0) // PAGE
        length -= unseen * PAGE
    pages = (length + PAGE - 1) // PAGE
    chunk = pages
    if SPLIT:
        chunk = tl.maximum((pages + splits - 1) // splits, MIN_PAGES)
    first = split * chunk
    last = tl.minimum(first + chunk, pages)

    token = tl.arange(0, PAGE)
    dim = tl.arange(0, D)
    column = tl.arange(0, N)
    sequences = tl.num_programs(0) // (HK * splits)
    place, seen = _columns(column, sequence, head, sequences, length, query_start, HK, G, ROWS)
    out_rows = out + place[None, :] * D + dim[:, None]
    is_head = (column < USED)[None, :]
    if first >= last:
        if split == 0:
            tl.store(out_rows, tl.zeros([D, N], tl.float32).to(out.dtype.element_ty), mask=is_head)
        return

    q_transposed = tl.load(q + place[None, :] * D + dim[:, None], mask=is_head, other=0.0).to(OPERAND)
    top = tl.full([N], LOWEST, tl.float32)
    total = tl.zeros([N], tl.float32)
    acc = tl.zeros([D, N], tl.float32)
    table = block_table + sequence.to(tl.int64) * num_blocks
    if WINDOW:
        table += unseen
    for block in tl.range(first, last, num_stages=STAGES):
        page = tl.load(table + block).to(tl.int64) * HK + head
        keys = cache + page * (2 * PAGE * D) + token[:, None] * D + dim[None, :]
        cached = block * PAGE + token < length
        k = tl.load(keys)
        # mask values after the end: 0 * NaN is NaN
        v = tl.load(keys + PAGE * D, mask=cached[:, None], other=0.0)
        scores = dot_ieee(k.to(OPERAND), q_transposed, tl.zeros([PAGE, N], tl.float32)) * scale_log2
        if QUANTIZED:
            scores *= tl.load(scales + page * (2 * PAGE) + token)[:, None]
        at = (block * PAGE + token)[:, None]
        is_seen = at < seen[None, :]
        if WINDOW:
            is_seen = is_seen & (at >= seen[None, :] - WINDOW)
        scores = tl.where(is_seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        keep = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[None, :])
        total = total * keep + tl.sum(p, 0)
        if QUANTIZED:
            p *= (tl.load(scales + page * (2 * PAGE) + PAGE + token, mask=cached, other=0.0) * PROBABILITY_SCALE)[
                :, None
            ]
        acc = dot_ieee(tl.trans(v.to(OPERAND)), p.to(OPERAND), acc * keep[None, :])
        top = new_top
    if QUANTIZED:
        acc *= 1.0 / PROBABILITY_SCALE
    total = tl.where(total > 0.0, total, 1.0)  # a row may see no token of a split
    acc /= total[None, :]

    if SPLIT:
        active = (pages + chunk - 1) // chunk
        if active > 1:
            slot = (sequence * HK + head) * splits
            tl.store(partial + ((slot + split) * USED + column[None, :]) * D + dim[:, None], acc, mask=is_head)
            tl.store(logsumexp + (slot + split) * USED + column, top + tl.log2(total), mask=column < USED)
            tl.debug_barrier()  # all threads have written before the arrival is counted
            if tl.atomic_add(arrivals + sequence * HK + head, 1, sem="acq_rel") == active - 1:
                tl.store(arrivals + sequence * HK + head, 0)
                merged = merge_splits(partial, logsumexp, slot, active, USED, GROUP, D, STEP)
                group = tl.arange(0, GROUP)
                at, _ = _columns(group, sequence, head, sequences, length, query_start, HK, G, ROWS)
                rows = out + at[:, None] * D + dim[None, :]
                tl.store(rows, merged.to(out.dtype.element_ty), mask=(group < USED)[:, None])
        else:
            tl.store(out_rows, acc.to(out.dtype.element_ty), mask=is_head)
    else:
        tl.store(out_rows, acc.to(out.dtype.element_ty), mask=is_head)


def decode_splits(rows: int, num_blocks: int, device: torch.device) -> int:
    """Return the number of splits per sequence that gives every SM two programs if all block tables are full.

    `rows`: number of (sequence, kv head) pairs.
    """
    return max(1, min(2 * multiprocessors(device) // rows, num_blocks // MIN_SPLIT_PAGES, MAX_SPLITS))


def takes_rows(q: torch.Tensor, kv_cache: torch.Tensor, rows: int) -> bool:
    """Return whether these kernels support `rows` rows per sequence, limited by registers; if not, prefill runs."""
    columns = rows * q.shape[1] // kv_cache.shape[1]
    return decode_gluon.fits(q, kv_cache, rows) or columns <= (16 if kv_cache.dtype == torch.float32 else MOST_COLUMNS)


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
    query_start: Optional[torch.Tensor] = None,
    rows: int = 1,
    exact: bool = False,
    prefix: Optional[tuple[torch.Tensor, ...]] = None,
) -> None:
    """Fill out [T, HQ * D] from q [T, HQ, D], with the Gluon kernel if it fits; the rest as in `paged_attention`.

    T is B * rows. More than one row per sequence (see `takes_rows`) needs query_start. `exact`: see `decode_exact`.
    `prefix`: (prefix, prefix_lse, prefix_plan), ignored by the other kernels.
    """
    arguments = (q, kv_cache, kv_scales, block_table, context_lens, softmax_scale, out, pdl, window)
    if exact and kv_scales is not None and decode_gluon.fits(q, kv_cache):
        decode_exact.launch(q, kv_cache, kv_scales, block_table, context_lens, softmax_scale, out, pdl, window)
    elif exact:
        launch_triton(*arguments, exact=True)
    elif decode_gluon.fits(q, kv_cache, rows):
        decode_gluon.launch(*arguments, query_start=query_start, rows=rows, prefix=prefix)
    else:
        launch_triton(*arguments, query_start, rows)


def launch_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    pdl: bool,
    window: int = 0,
    query_start: Optional[torch.Tensor] = None,
    rows: int = 1,
    exact: bool = False,
) -> None:
    """Run this file's kernel; arguments as in `launch`. With `exact` a split has always the same number of pages."""
    _, heads, dim = q.shape
    kv_heads = kv_cache.shape[1]
    group, pairs = heads // kv_heads, context_lens.shape[0] * kv_heads
    num_blocks, used = block_table.shape[1], rows * group
    least = chunk_pages(num_blocks) if exact else MIN_SPLIT_PAGES
    splits = cdiv(num_blocks, least) if exact else decode_splits(pairs, num_blocks, q.device)
    partial, logsumexp, arrivals = split_workspace(q.device, pairs, splits, used, dim)
    pdl = pdl and not INTERPRETED
    padded = next_power_of_2(used)
    decode_kernel[pairs * splits,](
        q, kv_cache, kv_cache if kv_scales is None else kv_scales, block_table, context_lens,
        context_lens if query_start is None else query_start, out, partial, logsumexp, arrivals, softmax_scale * LOG2_E,
        num_blocks, splits, HK=kv_heads, G=group, ROWS=rows, USED=used, GROUP=padded, N=max(16, padded), D=dim,
        STEP=max(1, 32 // padded), OPERAND=operand_type(kv_cache.dtype), QUANTIZED=kv_scales is not None,
        SPLIT=splits > 1, MIN_PAGES=least, WINDOW=window, PAGE=PAGE_SIZE,
        STAGES=1 if kv_cache.dtype == torch.float32 else 3, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
