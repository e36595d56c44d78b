"""Attention of query chunks over the paged cache, and of batches that mix chunks with decode rows, in Triton.

A program owns a tile of consecutive tokens of one sequence and one kv head with all its query heads (row = token *
group + head), and loops over the pages visible to its tokens. The grid is padded to T // tile + B + 1 tiles, and a
program finds its sequence on the device. Tiles of sequence b start at query_start[b] // tile + b, so each sequence may
end with a partial tile. Rows after query_start[B] are one more sequence, without context.

Q K^T is computed in e4m3 with FP8_SCORES (Q is rounded per token and head when loaded), otherwise in 16 bits. P V is
computed in 16 bits, with V converted after shared memory; softmax, scales and sums are fp32. With an fp32 cache all
products are fp32.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.kv_layout import PAGE_SIZE
from ..core.triton_support import INTERPRETED, dot_ieee, next_power_of_2, pdl_start, row_scale, to_e4m3
from . import prefill_gluon, prefill_wide_gluon
from .numerics import LOG2_E, LOWEST, PROBABILITY_SCALE, operand_type

TILE_ROWS = 64  # measured on an H200, 4096 causal tokens, e4m3: 410 us against 452 us with 128 rows and eight warps
SEARCHED = tl.constexpr(128)  # sequences searched at a time


@triton.jit
def attend(
    acc, top, total, q, row_factor, position, table, cache, scales, head, length, first, last, HK: tl.constexpr,
    D: tl.constexpr, OPERAND: tl.constexpr, QUANTIZED: tl.constexpr, FP8_SCORES: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Apply the online softmax over pages first..last. MASK is off for pages that every row sees entirely."""
    token = tl.arange(0, PAGE)
    dim = tl.arange(0, D)
    for block in tl.range(first, last, num_stages=STAGES):
        page = tl.load(table + block).to(tl.int64) * HK + head
        keys = cache + page * (2 * PAGE * D) + token[:, None] * D + dim[None, :]
        cached = block * PAGE + token < length
        k = tl.load(keys)
        # mask values after the end: 0 * NaN is NaN
        v = tl.load(keys + PAGE * D, mask=cached[:, None], other=0.0) if MASK else tl.load(keys + PAGE * D)
        if not FP8_SCORES:
            k = k.to(OPERAND)
        scores = dot_ieee(q, tl.trans(k), tl.zeros([q.shape[0], PAGE], tl.float32)) * row_factor[:, None]
        if QUANTIZED:
            scores *= tl.load(scales + page * (2 * PAGE) + token)[None, :]
        if MASK:
            visible = (block * PAGE + token)[None, :] <= position[:, None]
            if WINDOW:
                visible &= (block * PAGE + token)[None, :] > position[:, None] - WINDOW
            scores = tl.where(visible & cached[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        keep = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * keep + tl.sum(p, 1)
        if QUANTIZED:
            p *= (tl.load(scales + page * (2 * PAGE) + PAGE + token, mask=cached, other=0.0) * PROBABILITY_SCALE)[
                None, :
            ]
        acc = dot_ieee(p.to(OPERAND), v.to(OPERAND), acc * keep[:, None])
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["tokens", "sequences", "num_blocks"])
def prefill_kernel(
    q, cache, scales, block_table, context_lens, query_start, out, scale_log2, tokens, sequences, num_blocks,
    HK: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    OPERAND: tl.constexpr, QUANTIZED: tl.constexpr, FP8_SCORES: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of TILE tokens of one kv head; the grid is (kv heads, tiles).

    q, out [T, HK * G, D]; GROUP >= G is a power of two. Sequences are searched in a loop, so that one compilation
    supports any number of them.
    """
    pdl_start(PDL)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the end of a chunk reads the most pages: start with it
    begins_before = tl.zeros([SEARCHED], tl.int32)
    for searched in range(0, sequences + 1, SEARCHED):
        index = searched + tl.arange(0, SEARCHED)
        begin = tl.load(query_start + index, mask=index <= sequences, other=0)
        begins_before += ((begin // TILE + index <= tile) & (index <= sequences)).to(tl.int32)
    sequence = tl.sum(begins_before, 0) - 1
    is_real = sequence < sequences
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1, mask=is_real, other=0)
    end = tl.where(is_real, end, tokens)
    length = tl.load(context_lens + sequence, mask=is_real, other=0)
    tile_start = start + (tile - start // TILE - sequence) * TILE
    if tile_start >= end:
        return

    row = tl.arange(0, TILE * GROUP)
    token = tile_start + row // GROUP
    dim = tl.arange(0, D)
    is_query = (token < end) & (row % GROUP < G)
    offsets = ((token.to(tl.int64) * HK + head) * G + row % GROUP)[:, None] * D + dim[None, :]
    q_tile = tl.load(q + offsets, mask=is_query[:, None], other=0.0)
    row_factor = tl.full([TILE * GROUP], 1.0, tl.float32) * scale_log2
    if FP8_SCORES:
        wide = q_tile.to(tl.float32)
        q_scale = row_scale(tl.max(tl.abs(wide), 1))
        q_tile = to_e4m3(wide / q_scale[:, None])
        row_factor *= q_scale
    else:
        q_tile = q_tile.to(OPERAND)

    before = length - end  # position in the sequence: before + token
    position = before + token
    first_position = before + tile_start
    whole_pages = tl.minimum(tl.maximum(first_position + 1, 0), length) // PAGE  # visible to every row
    seen = tl.minimum(length, tl.maximum(first_position + TILE, 0))
    pages = (seen + PAGE - 1) // PAGE
    table = block_table + sequence.to(tl.int64) * num_blocks
    acc = tl.zeros([TILE * GROUP, D], tl.float32)
    top = tl.full([TILE * GROUP], LOWEST, tl.float32)
    total = tl.zeros([TILE * GROUP], tl.float32)
    first_page = 0
    if WINDOW:  # no row sees pages before first_page; every row sees all of the pages from unclipped on
        first_page = tl.maximum(first_position - WINDOW + 1, 0) // PAGE
        unclipped = (tl.maximum(first_position + TILE - WINDOW, 0) + PAGE - 1) // PAGE
        unclipped = tl.minimum(unclipped, whole_pages)
        acc, top, total = attend(
            acc, top, total, q_tile, row_factor, position, table, cache, scales, head, length, first_page, unclipped,
            HK, D, OPERAND, QUANTIZED, FP8_SCORES, True, WINDOW, PAGE, STAGES,
        )  # fmt: skip
        first_page = unclipped
    acc, top, total = attend(
        acc, top, total, q_tile, row_factor, position, table, cache, scales, head, length, first_page, whole_pages, HK,
        D, OPERAND, QUANTIZED, FP8_SCORES, False, 0, PAGE, STAGES,
    )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, q_tile, row_factor, position, table, cache, scales, head, length, whole_pages, pages, HK, D,
        OPERAND, QUANTIZED, FP8_SCORES, True, WINDOW, PAGE, STAGES,
    )  # fmt: skip
    if QUANTIZED:
        total *= PROBABILITY_SCALE
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # rows without context stay zero
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_query[:, None])


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    quantize_q: bool,
    out: torch.Tensor,
    pdl: bool,
    wide: Optional[torch.Tensor] = None,
    plan: Optional[torch.Tensor] = None,
    window: int = 0,
    exact: bool = False,
) -> None:
    """Fill out [T, HQ * D] from q [T, HQ, D], with the Gluon kernels if they fit; the rest as in `paged_attention`."""
    if kv_scales is not None and prefill_gluon.fits(q, kv_cache):
        if wide is not None and plan is not None:
            prefill_wide_gluon.launch(q, wide, plan, context_lens, query_start, softmax_scale, out, pdl)
        prefill_gluon.launch(
            q,
            kv_cache,
            kv_scales,
            block_table,
            context_lens,
            query_start,
            softmax_scale,
            quantize_q,
            out,
            pdl,
            plan,
            window,
            not exact,
        )
    else:
        launch_triton(
            q,
            kv_cache,
            kv_scales,
            block_table,
            context_lens,
            query_start,
            softmax_scale,
            quantize_q,
            out,
            pdl,
            window,
            exact,
        )


def launch_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    quantize_q: bool,
    out: torch.Tensor,
    pdl: bool,
    window: int = 0,
    exact: bool = False,
) -> None:
    """Run this file's kernel; arguments as in `launch`.

    `exact`: without fused multiply-adds, which would make the loops with and without MASK round differently. Which loop
    computes a page for a row depends on the chunk.
    """
    tokens, heads, dim = q.shape
    kv_heads, sequences = kv_cache.shape[1], context_lens.shape[0]
    group = heads // kv_heads
    padded_group = next_power_of_2(group)
    wide = kv_cache.dtype == torch.float32
    tile = max(1, (32 if wide else TILE_ROWS) // padded_group)
    pdl = pdl and not INTERPRETED
    prefill_kernel[kv_heads, tokens // tile + sequences + 1](
        q, kv_cache, kv_cache if kv_scales is None else kv_scales, block_table, context_lens, query_start, out,
        softmax_scale * LOG2_E, tokens, sequences, block_table.shape[1], HK=kv_heads, G=group, GROUP=padded_group,
        TILE=tile, D=dim, OPERAND=operand_type(kv_cache.dtype),
        QUANTIZED=kv_scales is not None, FP8_SCORES=quantize_q and kv_cache.dtype == torch.float8_e4m3fn,
        WINDOW=window, PAGE=PAGE_SIZE, STAGES=1 if wide else 2 if kv_scales is not None else 3, PDL=pdl,
        num_warps=8 if wide else 4, launch_pdl=pdl, **({"enable_fp_fusion": False} if exact else {}),
    )  # fmt: skip
