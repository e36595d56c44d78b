"""`embedding`: rows of the embedding table, by token id."""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.dtypes import as_residual, round_residual
from ..core.registry import register
from ..core.triton_support import cdiv, in_fp32, next_power_of_2, pdl_options, pdl_start, require_contiguous


def reference(
    input_ids: torch.Tensor, weight: torch.Tensor, stream_dtype: Optional[torch.dtype] = None
) -> torch.Tensor:
    """Return the rows [T, H] of weight [V, H] for input_ids [T] int32 or int64.

    `stream_dtype`: return a residual stream of that dtype; fp16 of a bf16 weight is scaled (`core/dtypes.py`). An id
    outside 0..V-1 raises an error here and gives zeros on the GPU.
    """
    rows = torch.nn.functional.embedding(input_ids, weight)
    return rows if stream_dtype is None else round_residual(rows.float(), stream_dtype, weight.dtype)


def fake(input_ids: torch.Tensor, weight: torch.Tensor, stream_dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """Return an empty result."""
    return weight.new_empty((*input_ids.shape, weight.shape[1]), dtype=stream_dtype or weight.dtype)


@triton.jit
def _embedding_kernel(input_ids, weight, out, VOCAB, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    model: tl.constexpr = weight.dtype.element_ty
    stream: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    pdl_start(PDL)
    token = tl.load(input_ids + row).to(tl.int64)
    readable = tl.where((token >= 0) & (token < VOCAB), WIDTH, 0)
    values = tl.load(weight + token * WIDTH + column, mask=column < readable, other=0.0)
    if stream != model:
        values, _ = as_residual(in_fp32(values), stream, model)
    tl.store(out + row * WIDTH + column, values, mask=inside)


def launch(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    stream_dtype: Optional[torch.dtype] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (rows,). Ignores `sm_budget`: the launch is small."""
    require_contiguous("embedding", input_ids=input_ids, weight=weight)
    vocab, width = weight.shape
    if input_ids.numel() == 0:
        return
    block = min(next_power_of_2(width), 2048)
    grid = (input_ids.numel(), cdiv(width, block))
    _embedding_kernel[grid](input_ids, weight, out[0], vocab, WIDTH=width, BLOCK=block, num_warps=4, **pdl_options(pdl))


embedding = register("embedding", reference, fake, launch, gathers="weight")
