"""`paged_attention_blocks`: decode attention whose result goes to `decoder_block`: e4m3 with one scale per token and
128 columns.

With head_dim 128 a block is one head, so the program that merges a head's splits can quantize it on the spot.
"""

from typing import Optional

import torch

from ..core.registry import register
from ..core.workspace import workspace
from ..rows.quantize import E4M3
from ..rows.quantize_blocks import fake as quantize_blocks_fake
from ..rows.quantize_blocks import launch as quantize_blocks_launch
from ..rows.quantize_blocks import reference as quantize_blocks_reference
from . import decode as attention_decode
from . import decode_gluon
from .paged_attention import HEAD_DIMS, check_arguments, paged_attention_reference


def reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    dtype: torch.dtype = E4M3,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query row a sequence: q [B, HQ, D] with HQ * D a multiple of 128, the rest as in `paged_attention`
    -> (q [B, HQ * D] e4m3 or int8, scale [HQ * D / 128, P]).

    What is quantized (as in `quantize_blocks`) is the attention's result rounded to q's dtype.
    """
    query_start = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    rows = paged_attention_reference(
        q, kv_cache, kv_scales, block_table, context_lens, query_start, softmax_scale, False, True, window=window
    )
    return quantize_blocks_reference(rows, dtype)


def fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    dtype: torch.dtype = E4M3,
    window: int = 0,
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
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"the attention kernels know head_dim {HEAD_DIMS}, not {q.shape[2]}; run the reference on the CPU instead"
        )
    tokens, width = out[0].shape
    if tokens == 0:
        return
    if decode_gluon.fits(q, kv_cache):
        decode_gluon.launch(
            q, kv_cache, kv_scales, block_table, context_lens, softmax_scale, out[0], pdl, window, out[1]
        )
        return
    nbytes = tokens * width * q.element_size()
    rows = workspace(q.device, "paged_attention_blocks", nbytes)[:nbytes].view(q.dtype).view(tokens, width)
    attention_decode.launch(q, kv_cache, kv_scales, block_table, context_lens, softmax_scale, rows, pdl, window)
    quantize_blocks_launch(rows, dtype, out=out, pdl=pdl)


paged_attention_blocks = register(
    "paged_attention_blocks", reference, fake, launch, kind="attention", family="attention"
)
