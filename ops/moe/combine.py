"""`moe_combine`: the weighted sum of the results of a token's experts."""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, next_power_of_2, pdl_options, pdl_start, require_contiguous, round_to
from ..elementwise.weighted_rows import weighted_rows, weighted_rows_reference


def reference(z: torch.Tensor, weights: torch.Tensor, delta: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Return y [T, N]: the sum over j of weights[t, j] * (z + delta)[t * k + j], in this order in fp32, rounded once.

    z              [T * k, N] model dtype
    weights        [T, k] fp32; rows of weight 0 are not read
    delta          [T * k, N] of the adapters, or None
    """
    return weighted_rows_reference(z, weights, delta).to(z.dtype)


def fake(z: torch.Tensor, weights: torch.Tensor, delta: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Return an empty result."""
    return z.new_empty((weights.shape[0], z.shape[1]))


@triton.jit
def _combine_kernel(
    z, weights, delta, y, WIDTH: tl.constexpr, TOP_K: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of one token per program."""
    pdl_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = weighted_rows(z, delta, weights, token, column, WIDTH, TOP_K, HAS_DELTA)
    tl.store(y + token * WIDTH + column, round_to(total, y.dtype.element_ty), mask=column < WIDTH)


def launch(
    z: torch.Tensor,
    weights: torch.Tensor,
    delta: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (y,). Ignores `sm_budget`: one small CTA per token and 1,024 columns."""
    require_contiguous("moe_combine", z=z, weights=weights, delta=delta)
    (tokens, top_k), width = weights.shape, z.shape[1]
    block = min(1024, next_power_of_2(width))
    if tokens:
        _combine_kernel[tokens, cdiv(width, block)](
            z, weights, delta, out[0], WIDTH=width, TOP_K=top_k, HAS_DELTA=delta is not None, BLOCK=block, num_warps=4,
            **pdl_options(pdl),
        )  # fmt: skip


moe_combine = register("moe_combine", reference, fake, launch, kind="silu_mul", family="moe")
