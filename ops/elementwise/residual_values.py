"""`residual_values`: unscaled values of a residual stream in the model's dtype, for readers that are not norms."""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.dtypes import of_residual, residual_in_fp32
from ..core.registry import register
from ..core.triton_support import cdiv, next_power_of_2, pdl_options, pdl_start, require_contiguous, round_to


def reference(residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of residual [..., H], a stream in a model of `dtype`, in this dtype (`core/dtypes.py`)."""
    return residual_in_fp32(residual, dtype).to(dtype, copy=True)


def fake(residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty result."""
    return residual.new_empty(residual.shape, dtype=dtype)


@triton.jit
def _residual_values_kernel(residual, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    model: tl.constexpr = out.dtype.element_ty
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    pdl_start(PDL)
    held = tl.load(residual + at, mask=inside, other=0.0)
    tl.store(out + at, round_to(of_residual(held, model), model), mask=inside)


def launch(
    residual: torch.Tensor,
    dtype: torch.dtype,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (values,). Ignores `sm_budget`: the launch is small."""
    require_contiguous("residual_values", residual=residual)
    if residual.numel() == 0:
        return
    width = residual.shape[-1]
    block = min(next_power_of_2(width), 2048)
    grid = (residual.numel() // width, cdiv(width, block))
    _residual_values_kernel[grid](residual, out[0], WIDTH=width, BLOCK=block, num_warps=4, **pdl_options(pdl))


residual_values = register("residual_values", reference, fake, launch)
