"""Decode attention in Triton: one query row a sequence, head_dim 64 or 128, any cache dtype.

A program owns one (sequence, kv head, split) and walks its pages, one of 64 tokens a step. Products are transposed, S^T
= K Q^T and O^T = V^T P^T, so that pages are the tall operand of the tensor cores and the few query heads of a group the
narrow one (padded to 16). A sequence's pages are divided evenly among its splits on the device, since the host does not
know the lengths (they change under a captured graph); with a window, a sequence begins at the page that it reaches. A
split without pages leaves at once. The last split to arrive merges all of them in order: same bits at every run.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors
from ..core.kv_layout import PAGE_SIZE
from ..core.triton_support import INTERPRETED, dot_ieee, next_power_of_2, pdl_start
from . import decode_gluon
from .pieces import LOG2_E, LOWEST, PROBABILITY_SCALE, operand_type, split_workspace

MAX_SPLITS = 64
MIN_SPLIT_PAGES = tl.constexpr(2)


@triton.jit
def merge_splits(
    partial, logsumexp, row, active, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr
):
    """Splits row..row + active of one (sequence, kv head), [G, D] each, merged in ascending order -> [GROUP, D]
    fp32.
    """
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


@triton.jit(do_not_specialize=["num_blocks", "splits"])
def decode_kernel(
    q, cache, scales, block_table, context_lens, out, partial, logsumexp, arrivals, scale_log2, num_blocks, splits,
    HK: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
    OPERAND: tl.constexpr, QUANTIZED: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q, out [B, HK * G, D]; partial [B * HK * splits, G, D], logsumexp [B * HK * splits, G] fp32 (log2 units);
    arrivals [B * HK] int32, zero. WINDOW: tokens that are seen, the newest ones; 0: all.
    """
    pdl_start(PDL)
    program = tl.program_id(0)
    head = program % HK
    split = program // HK % splits
    sequence = program // (HK * splits)
    length = tl.load(context_lens + sequence)
    if WINDOW:  # a sequence begins at the first page that is seen
        unseen = tl.maximum(length - WINDOW, 0) // PAGE
        length -= unseen * PAGE
    pages = (length + PAGE - 1) // PAGE
    chunk = pages
    if SPLIT:
        chunk = tl.maximum((pages + splits - 1) // splits, MIN_SPLIT_PAGES)
    first = split * chunk
    last = tl.minimum(first + chunk, pages)

    token = tl.arange(0, PAGE)
    dim = tl.arange(0, D)
    column = tl.arange(0, N)
    row = sequence.to(tl.int64) * HK + head
    out_rows = out + (row * G + column[None, :]) * D + dim[:, None]
    is_head = (column < G)[None, :]
    if first >= last:
        if split == 0:
            tl.store(out_rows, tl.zeros([D, N], tl.float32).to(out.dtype.element_ty), mask=is_head)
        return

    q_transposed = tl.load(q + (row * G + column[None, :]) * D + dim[:, None], mask=is_head, other=0.0).to(OPERAND)
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
        # what lies after the end may be anything: 0 * NaN is NaN
        v = tl.load(keys + PAGE * D, mask=cached[:, None], other=0.0)
        scores = dot_ieee(k.to(OPERAND), q_transposed, tl.zeros([PAGE, N], tl.float32)) * scale_log2
        if QUANTIZED:
            scores *= tl.load(scales + page * (2 * PAGE) + token)[:, None]
        seen = cached
        if WINDOW:
            seen = cached & (block * PAGE + token >= length - WINDOW)
        scores = tl.where(seen[:, None], scores, -float("inf"))
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
    acc /= total[None, :]

    if SPLIT:
        active = (pages + chunk - 1) // chunk
        if active > 1:
            slot = (sequence * HK + head) * splits
            tl.store(partial + ((slot + split) * G + column[None, :]) * D + dim[:, None], acc, mask=is_head)
            tl.store(logsumexp + (slot + split) * G + column, top + tl.log2(total), mask=column < G)
            tl.debug_barrier()  # every thread's part is written before one of them counts the program in
            if tl.atomic_add(arrivals + sequence * HK + head, 1, sem="acq_rel") == active - 1:
                tl.store(arrivals + sequence * HK + head, 0)
                merged = merge_splits(partial, logsumexp, slot, active, G, GROUP, D, STEP)
                group = tl.arange(0, GROUP)
                rows = out + (row * G + group[:, None]) * D + dim[None, :]
                tl.store(rows, merged.to(out.dtype.element_ty), mask=(group < G)[:, None])
        else:
            tl.store(out_rows, acc.to(out.dtype.element_ty), mask=is_head)
    else:
        tl.store(out_rows, acc.to(out.dtype.element_ty), mask=is_head)


def decode_splits(rows: int, num_blocks: int, device: torch.device) -> int:
    """Splits of a sequence's pages: enough that `rows` (sequence, kv head) pairs give every SM two programs, were
    all tables full.
    """
    return max(1, min(2 * multiprocessors(device) // rows, num_blocks // MIN_SPLIT_PAGES.value, MAX_SPLITS))


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
) -> None:
    """Fill out [B, HQ * D] from q [B, HQ, D]; the rest as in `paged_attention`.

    Takes the Gluon kernel where that one fits.
    """
    if decode_gluon.fits(q, kv_cache):
        decode_gluon.launch(q, kv_cache, kv_scales, block_table, context_lens, softmax_scale, out, pdl, window)
    else:
        launch_triton(q, kv_cache, kv_scales, block_table, context_lens, softmax_scale, out, pdl, window)


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
) -> None:
    """`launch`, always with the kernel of this file."""
    sequences, heads, dim = q.shape
    kv_heads = kv_cache.shape[1]
    group = heads // kv_heads
    rows, num_blocks = sequences * kv_heads, block_table.shape[1]
    splits = decode_splits(rows, num_blocks, q.device)
    partial, logsumexp, arrivals = split_workspace(q.device, rows, splits, group, dim)
    pdl = pdl and not INTERPRETED
    padded_group = next_power_of_2(group)
    decode_kernel[rows * splits,](
        q, kv_cache, kv_cache if kv_scales is None else kv_scales, block_table, context_lens, out, partial, logsumexp,
        arrivals, softmax_scale * LOG2_E, num_blocks, splits, HK=kv_heads, G=group, GROUP=padded_group,
        N=max(16, padded_group), D=dim, STEP=max(1, 32 // padded_group), OPERAND=operand_type(kv_cache.dtype),
        QUANTIZED=kv_scales is not None, SPLIT=splits > 1, WINDOW=window, PAGE=PAGE_SIZE,
        STAGES=1 if kv_cache.dtype == torch.float32 else 3, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
