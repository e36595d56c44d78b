"""`embedding`: rows of the embedding table, by token id, with the LoRA of each token's adapter."""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.dtypes import as_residual, round_residual
from ..core.registry import register
from ..core.reproducible_sums import product
from ..core.triton_support import cdiv, in_fp32, next_power_of_2, pdl_options, pdl_start, require_contiguous

LORA_ELEMENTS = 8192  # elements of B in a program


def reference(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    stream_dtype: Optional[torch.dtype] = None,
    lora_a: Optional[torch.Tensor] = None,
    lora_b: Optional[torch.Tensor] = None,
    adapter_index: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return the rows [T, H] of weight [V, H] for input_ids [T] int32 or int64.

    With lora_a [S, V, R], lora_b [S, H, R] and adapter_index [T] int32 (-1 = no adapter) a token's row is
    weight[id] + lora_b[slot] @ lora_a[slot, id], in fp32 and rounded once. `stream_dtype`: return a residual stream of
    that dtype; fp16 of a bf16 weight is scaled (`core/dtypes.py`). An id outside 0..V-1 raises an error here and gives
    zeros on the GPU.
    """
    rows = torch.nn.functional.embedding(input_ids, weight)
    if lora_a is not None and lora_b is not None and adapter_index is not None:
        wide = rows.float()
        for slot in adapter_index[adapter_index >= 0].unique().tolist():
            tokens = (adapter_index == slot).nonzero().squeeze(1)
            ranks = lora_a[slot][input_ids[tokens].long()]
            wide[tokens] += product(ranks, lora_b[slot], torch.float32)
        return round_residual(wide, stream_dtype or weight.dtype, weight.dtype)
    return rows if stream_dtype is None else round_residual(rows.float(), stream_dtype, weight.dtype)


def fake(
    input_ids: torch.Tensor, weight: torch.Tensor, stream_dtype: Optional[torch.dtype] = None, *_: Any
) -> torch.Tensor:
    """Return an empty result."""
    return weight.new_empty((*input_ids.shape, weight.shape[1]), dtype=stream_dtype or weight.dtype)


@triton.jit
def _embedding_kernel(
    input_ids, weight, out, lora_a, lora_b, adapter_index, VOCAB, RANK, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    model: tl.constexpr = weight.dtype.element_ty
    stream: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    pdl_start(PDL)
    token = tl.load(input_ids + row).to(tl.int64)
    readable = tl.where((token >= 0) & (token < VOCAB), WIDTH, 0)
    values = tl.load(weight + token * WIDTH + column, mask=column < readable, other=0.0)
    if RANKS:
        slot = tl.load(adapter_index + row).to(tl.int64)
        rank = tl.arange(0, RANKS)
        ranks = tl.where((slot >= 0) & (readable > 0), RANK, 0)
        a = tl.load(lora_a + (slot * VOCAB + token) * RANK + rank, mask=rank < ranks, other=0.0)
        places = lora_b + (slot * WIDTH + column)[:, None] * RANK + rank[None, :]
        b = tl.load(places, mask=inside[:, None] & (rank < ranks)[None, :], other=0.0)
        values = in_fp32(values) + tl.sum(in_fp32(b) * in_fp32(a)[None, :], axis=1)
    if RANKS or stream != model:
        values, _ = as_residual(in_fp32(values), stream, model)
    tl.store(out + row * WIDTH + column, values, mask=inside)


def launch(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    stream_dtype: Optional[torch.dtype] = None,
    lora_a: Optional[torch.Tensor] = None,
    lora_b: Optional[torch.Tensor] = None,
    adapter_index: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (rows,). Ignores `sm_budget`: the launch is small."""
    require_contiguous(
        "embedding", input_ids=input_ids, weight=weight, lora_a=lora_a, lora_b=lora_b, adapter_index=adapter_index
    )
    vocab, width = weight.shape
    rank = 0 if lora_a is None else lora_a.shape[2]
    ranks = next_power_of_2(rank) if rank else 0
    if input_ids.numel() == 0:
        return
    block = min(next_power_of_2(width), max(16, LORA_ELEMENTS // ranks) if ranks else 2048)
    grid = (input_ids.numel(), cdiv(width, block))
    _embedding_kernel[grid](
        input_ids, weight, out[0], lora_a, lora_b, adapter_index, vocab, rank, WIDTH=width, BLOCK=block, RANKS=ranks,
        num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


embedding = register("embedding", reference, fake, launch, gathers="weight")
