"""`combine_add_rms_norm` and `combine_add_rms_norm_quant`: the sum of a token's experts, then residual and norm.

They are `add_rms_norm` and `add_rms_norm_quant` (`rms_norm`) with a weighted sum of k rows for each token in place of
x + delta. The sum stays in fp32: `moe_combine` alone would round it.
"""

from typing import Any, Optional

import torch

from ..core.dtypes import residual_in_fp32, round_residual
from ..core.registry import register
from .quantize import E4M3
from .quantize import reference as quantize_rowwise_reference
from .rms_norm import launch_norm, rms_norm_quant_fake, rms_norm_reference
from .weighted_rows import weighted_rows_reference


def combine_add_rms_norm_reference(
    z: torch.Tensor,
    weights: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y [T, N] in z's dtype, new_residual like residual): y is the norm of combined rows + residual.

    z         [T * k, N] model dtype, and delta [T * k, N] of the adapters, or None
    weights   [T, k] fp32; rows of weight 0 are not read
    residual  [T, N] model dtype, or scaled fp16
    gain      [N] of the norm
    """
    total = weighted_rows_reference(z, weights, delta) + residual_in_fp32(residual, gain.dtype)
    new_residual = round_residual(total, residual.dtype, gain.dtype)
    return rms_norm_reference(new_residual, gain, eps), new_residual


def combine_add_rms_norm_quant_reference(
    z: torch.Tensor,
    weights: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, q, scale, new_residual): the results of `combine_add_rms_norm`, y quantized as in `rms_norm_quant`."""
    y, new_residual = combine_add_rms_norm_reference(z, weights, delta, residual, gain, eps)
    q, scale = quantize_rowwise_reference(y, dtype, rotate)
    return y if keep else y.new_empty(0, y.shape[-1]), q, scale, new_residual


def combine_add_rms_norm_fake(
    z: torch.Tensor, weights: torch.Tensor, delta: Optional[torch.Tensor], residual: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return z.new_empty(residual.shape), residual.new_empty(residual.shape)


def combine_add_rms_norm_quant_fake(
    z: torch.Tensor,
    weights: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    keep: bool,
    dtype: torch.dtype = E4M3,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return *rms_norm_quant_fake(residual, gain, eps, keep, dtype), residual.new_empty(residual.shape)


def combine_add_rms_norm_launch(
    z: torch.Tensor,
    weights: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (y, new_residual). Both ops ignore `sm_budget`: one small CTA per token."""
    y, new_residual = out
    launch_norm(
        "combine_add_rms_norm", z, residual, delta, gain, eps, pdl, y=y, new_residual=new_residual,
        expert_weights=weights,
    )  # fmt: skip


def combine_add_rms_norm_quant_launch(
    z: torch.Tensor,
    weights: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (y, q, scale, new_residual)."""
    y, q, scale, new_residual = out
    launch_norm(
        "combine_add_rms_norm_quant", z, residual, delta, gain, eps, pdl, y=y if keep else None, q=q, scale=scale,
        new_residual=new_residual, rotate=rotate, expert_weights=weights,
    )  # fmt: skip


combine_add_rms_norm = register(
    "combine_add_rms_norm",
    combine_add_rms_norm_reference,
    combine_add_rms_norm_fake,
    combine_add_rms_norm_launch,
    kind="norm",
    family="norm",
)
combine_add_rms_norm_quant = register(
    "combine_add_rms_norm_quant",
    combine_add_rms_norm_quant_reference,
    combine_add_rms_norm_quant_fake,
    combine_add_rms_norm_quant_launch,
    kind="norm",
    family="norm",
)
