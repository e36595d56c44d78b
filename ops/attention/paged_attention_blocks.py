"""`paged_attention_blocks`: decode attention for `decoder_block`, quantized per token and 128 columns.

With head_dim 128 a block is one head, so the program that merges a head's splits can quantize it.
"""

from typing import Any, Optional

import torch

from ..core.device import workspace
from ..core.registry import register
from ..elementwise.quantize import E4M3
from ..elementwise.quantize_blocks import fake as quantize_blocks_fake
from ..elementwise.quantize_blocks import launch as quantize_blocks_launch
from ..elementwise.quantize_blocks import reference as quantize_blocks_reference
from . import decode as attention_decode
from . import decode_gluon
from .paged_attention import (
    HEAD_DIMS,
    check_arguments,
    check_prefix,
    check_rows,
    paged_attention_launch,
    paged_attention_reference,
)


def reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    dtype: torch.dtype = E4M3,
    window: int = 0,
    query_start: Optional[torch.Tensor] = None,
    rows: int = 1,
    prefix: Optional[torch.Tensor] = None,
    prefix_lse: Optional[torch.Tensor] = None,
    prefix_plan: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q [B * rows, HQ * D] e4m3 or int8, scale [HQ * D / 128, P]) of at most `rows` query rows per sequence.

    q is [B * rows, HQ, D] with HQ * D a multiple of 128; query_start is optional with one row per sequence; the rest as
    in `paged_attention`. The attention's result is rounded to q's dtype, then quantized as in `quantize_blocks`.
    """
    starts = _starts(q, query_start, rows)
    attended = paged_attention_reference(
        q,
        kv_cache,
        kv_scales,
        block_table,
        context_lens,
        starts,
        softmax_scale,
        False,
        rows == 1,
        window=window,
        rows=rows,
        prefix=prefix,
        prefix_lse=prefix_lse,
        prefix_plan=prefix_plan,
    )
    return quantize_blocks_reference(attended, dtype)


def _starts(q: torch.Tensor, query_start: Optional[torch.Tensor], rows: int) -> torch.Tensor:
    """Return the first row of each sequence. Raises ValueError if query_start is needed and missing."""
    if rows == 1:
        return torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    if query_start is None:
        raise ValueError(f"rows={rows} needs query_start, since sequences may have fewer rows")
    return query_start


def fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    dtype: torch.dtype = E4M3,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return quantize_blocks_fake(q.flatten(1), dtype)


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    dtype: torch.dtype = E4M3,
    window: int = 0,
    query_start: Optional[torch.Tensor] = None,
    rows: int = 1,
    prefix: Optional[torch.Tensor] = None,
    prefix_lse: Optional[torch.Tensor] = None,
    prefix_plan: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (quantized, scale); if the kernel cannot quantize, 16-bit rows are written to a workspace first.

    `pdl` and `sm_budget` as for `paged_attention`.
    """
    check_arguments(q, kv_cache, kv_scales, window)
    check_rows(q, context_lens, rows)
    shared = check_prefix(q, kv_cache, rows == 1, window, prefix, prefix_lse, prefix_plan)
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"attention kernels support head_dim {HEAD_DIMS}, not {q.shape[2]}; run the reference on the CPU instead"
        )
    tokens, width = out[0].shape
    if tokens == 0:
        return
    operands = (q, kv_cache, kv_scales, block_table, context_lens)
    if decode_gluon.fits(q, kv_cache, rows):
        starts = None if rows == 1 else _starts(q, query_start, rows)
        decode_gluon.launch(*operands, softmax_scale, out[0], pdl, window, out[1], starts, rows, shared)
        return
    nbytes = tokens * width * q.element_size()
    attended = workspace(q.device, "paged_attention_blocks", nbytes)[:nbytes].view(q.dtype).view(tokens, width)
    if rows == 1:
        attention_decode.launch(*operands, softmax_scale, attended, pdl, window, prefix=shared)
    else:
        starts = _starts(q, query_start, rows)
        paged_attention_launch(
            *operands, starts, softmax_scale, quantize_q=False, decode=False, window=window, rows=rows, out=(attended,),
            pdl=pdl,
        )  # fmt: skip
    quantize_blocks_launch(attended, dtype, out=out, pdl=pdl)


paged_attention_blocks = register(
    "paged_attention_blocks", reference, fake, launch, kind="attention", family="attention"
)
