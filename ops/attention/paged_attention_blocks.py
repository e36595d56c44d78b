"""`paged_attention_blocks`: attention of decode steps, with drafts too, whose result goes to `decoder_block`: e4m3 with
one scale per token and 128 columns.

With head_dim 128 a block is one head, so the program that merges a head's splits can quantize it on the spot.
"""

from typing import Optional

import torch

from ..core.registry import register
from ..core.workspace import workspace
from ..elementwise.quantize import E4M3
from ..elementwise.quantize_blocks import fake as quantize_blocks_fake
from ..elementwise.quantize_blocks import launch as quantize_blocks_launch
from ..elementwise.quantize_blocks import reference as quantize_blocks_reference
from . import decode as attention_decode
from . import decode_gluon
from .paged_attention import (
    HEAD_DIMS,
    check_arguments,
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """At most `rows` query rows a sequence: q [B * rows, HQ, D] with HQ * D a multiple of 128, the rest as in
    `paged_attention` (query_start: with one row a sequence it may be left out)
    -> (q [B * rows, HQ * D] e4m3 or int8, scale [HQ * D / 128, P]).

    What is quantized (as in `quantize_blocks`) is the attention's result rounded to q's dtype.
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
    )
    return quantize_blocks_reference(attended, dtype)


def _starts(q: torch.Tensor, query_start: Optional[torch.Tensor], rows: int) -> torch.Tensor:
    """Where sequences' rows begin. Raises ValueError where nothing says so."""
    if rows == 1:
        return torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    if query_start is None:
        raise ValueError(f"with rows={rows} a sequence may have fewer: query_start must say where its rows begin")
    return query_start


def fake(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `reference`, not filled."""
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
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (quantized, scale); where the kernel does not quantize by itself, 16-bit rows go through a
    workspace.

    `pdl` and `sm_budget` as for `paged_attention`.
    """
    check_arguments(q, kv_cache, kv_scales, window)
    check_rows(q, context_lens, rows)
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"the attention kernels know head_dim {HEAD_DIMS}, not {q.shape[2]}; run the reference on the CPU instead"
        )
    tokens, width = out[0].shape
    if tokens == 0:
        return
    operands = (q, kv_cache, kv_scales, block_table, context_lens)
    if decode_gluon.fits(q, kv_cache, rows):
        starts = None if rows == 1 else _starts(q, query_start, rows)
        decode_gluon.launch(*operands, softmax_scale, out[0], pdl, window, out[1], starts, rows)
        return
    nbytes = tokens * width * q.element_size()
    attended = workspace(q.device, "paged_attention_blocks", nbytes)[:nbytes].view(q.dtype).view(tokens, width)
    if rows == 1:
        attention_decode.launch(*operands, softmax_scale, attended, pdl, window)
    else:
        starts = _starts(q, query_start, rows)
        paged_attention_launch(
            *operands,
            starts,
            softmax_scale,
            quantize_q=False,
            decode=False,
            window=window,
            rows=rows,
            out=(attended,),
            pdl=pdl,
        )
    quantize_blocks_launch(attended, dtype, out=out, pdl=pdl)


paged_attention_blocks = register(
    "paged_attention_blocks", reference, fake, launch, kind="attention", family="attention"
)
