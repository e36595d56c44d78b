"""RMSNorm with a residual sum (and LoRA delta) before it and rowwise quantization (e4m3 or int8) after it.

Four ops, and two in `combine_rms_norm`, share one kernel with one CTA per token. The norm is HF's LlamaRMSNorm:
statistics in fp32, x * rsqrt(mean(x^2) + eps) rounded to the model's dtype, then multiplied by the weight in that
dtype. `keep`: also return the unquantized y (for a LoRA shrink).

The residual stream (x of the ops without a sum, residual and new_residual of the others) may be scaled fp16 in a bf16
model (`core/dtypes.py`); y is then bf16.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.dtypes import as_residual, is_scaled, of_residual, residual_in_fp32, round_residual
from ..core.registry import register
from ..core.reproducible_sums import mean_square
from ..core.triton_support import in_fp32, pdl_options, pdl_start, require_contiguous, rounded_to
from .quantize import (
    E4M3,
    rotated_width,
    row_block,
    store_quantized_row,
)
from .quantize import (
    fake as quantize_rowwise_fake,
)
from .quantize import (
    reference as quantize_rowwise_reference,
)
from .weighted_rows import weighted_rows


def _normed(stream: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the norm of a residual stream."""
    return weight.dtype if is_scaled(stream.dtype, weight.dtype) else stream.dtype


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of x [..., H] with weight [H], in x's dtype, or in bf16 for an fp16 stream in a bf16 model."""
    values = residual_in_fp32(x, weight.dtype)
    normalised = values * torch.rsqrt(mean_square(values) + eps)
    return normalised.to(_normed(x, weight)) * weight


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, delta: Optional[torch.Tensor], weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y like x, new_residual like residual): y is the norm of x + delta + residual in fp32, rounded once."""
    total = x.float() if delta is None else x.float() + delta.float()
    total = total + residual_in_fp32(residual, weight.dtype)
    new_residual = round_residual(total, residual.dtype, weight.dtype)
    return rms_norm_reference(new_residual, weight, eps), new_residual


def rms_norm_quant_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, keep: bool, dtype: torch.dtype = E4M3, rotate: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, q [..., H] e4m3 or int8, scale fp32 [...]), quantized as in `quantize_rowwise`.

    y is [0, H] unless `keep`.
    """
    y = rms_norm_reference(x, weight, eps)
    q, scale = quantize_rowwise_reference(y, dtype, rotate)
    return y if keep else y.new_empty(0, y.shape[-1]), q, scale


def add_rms_norm_quant_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    delta: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, q, scale, new_residual): the results of `add_rms_norm`, with y quantized as in `rms_norm_quant`."""
    y, new_residual = add_rms_norm_reference(x, residual, delta, weight, eps)
    q, scale = quantize_rowwise_reference(y, dtype, rotate)
    return y if keep else x.new_empty(0, x.shape[-1]), q, scale, new_residual


def rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return an empty result."""
    return x.new_empty(x.shape, dtype=_normed(x, weight))


def add_rms_norm_fake(x: torch.Tensor, residual: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return x.new_empty(x.shape), residual.new_empty(residual.shape)


def rms_norm_quant_fake(
    x: torch.Tensor, weight: torch.Tensor, eps: float, keep: bool, dtype: torch.dtype = E4M3, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty results."""
    y = x.new_empty(x.shape if keep else (0, x.shape[-1]), dtype=_normed(x, weight))
    return y, *quantize_rowwise_fake(x, dtype)


def add_rms_norm_quant_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    delta: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    keep: bool,
    dtype: torch.dtype = E4M3,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return *rms_norm_quant_fake(x, weight, eps, keep, dtype), residual.new_empty(residual.shape)


@triton.jit
def _rms_norm_kernel(
    x, residual, delta, weight, y, q, scale, new_residual, expert_weights, eps, ADD: tl.constexpr,
    HAS_DELTA: tl.constexpr, TOP_K: tl.constexpr, QUANTIZE: tl.constexpr, KEEP: tl.constexpr, ROTATE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # TOP_K: rows of x and delta for each token, whose weighted sum is added; 0: one row, added as it is
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    model: tl.constexpr = weight.dtype.element_ty
    given: tl.constexpr = x.dtype.element_ty
    normed: tl.constexpr = model if given == tl.float16 and model == tl.bfloat16 else given
    gain = tl.load(weight + column, mask=inside, other=0.0)  # a weight: no earlier kernel writes it
    pdl_start(PDL)
    at = row * WIDTH + column
    if ADD:
        if TOP_K:
            values = weighted_rows(x, delta, expert_weights, row, column, WIDTH, TOP_K, HAS_DELTA)
        else:
            values = in_fp32(tl.load(x + at, mask=inside, other=0.0))
            if HAS_DELTA:
                values += in_fp32(tl.load(delta + at, mask=inside, other=0.0))
        values += of_residual(tl.load(residual + at, mask=inside, other=0.0), model)
        held, values = as_residual(values, new_residual.dtype.element_ty, model)
        tl.store(new_residual + at, held, mask=inside)
    else:
        values = of_residual(tl.load(x + at, mask=inside, other=0.0), model)
    normalised = values * tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    result = rounded_to(rounded_to(normalised, normed) * gain.to(tl.float32), normed)
    if KEEP:
        tl.store(y + at, result.to(normed), mask=inside)
    if QUANTIZE:
        store_quantized_row(result, q, scale, row, column, inside, WIDTH, BLOCK, ROTATE)


def launch_norm(
    name: str,
    x: torch.Tensor,
    residual: Optional[torch.Tensor],
    delta: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    pdl: bool,
    *,
    y: Optional[torch.Tensor],
    q: Optional[torch.Tensor] = None,
    scale: Optional[torch.Tensor] = None,
    new_residual: Optional[torch.Tensor] = None,
    rotate: int = 0,
    expert_weights: Optional[torch.Tensor] = None,
) -> None:
    """Run the kernel for any of the ops; `expert_weights` [T, k]: x and delta have k rows for each token."""
    require_contiguous(name, x=x, residual=residual, delta=delta, weight=weight, expert_weights=expert_weights)
    width = x.shape[-1]
    top_k = 0 if expert_weights is None else expert_weights.shape[1]
    block, warps = row_block(width)
    if width > block:
        raise ValueError(f"{name}: a row of {width} does not fit one CTA; the hidden size must be at most {block}")
    if x.numel() == 0:
        return
    _rms_norm_kernel[x.numel() // width // max(1, top_k),](
        x, residual, delta, weight, y, q, scale, new_residual, expert_weights, eps, ADD=residual is not None,
        HAS_DELTA=delta is not None, TOP_K=top_k, QUANTIZE=q is not None, KEEP=y is not None,
        ROTATE=rotated_width(width, rotate), WIDTH=width, BLOCK=block, num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip


def rms_norm_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (y,). All four ops ignore `sm_budget`: one small CTA per token."""
    launch_norm("rms_norm", x, None, None, weight, eps, pdl, y=out[0])


def add_rms_norm_launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    delta: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (y, new_residual)."""
    launch_norm("add_rms_norm", x, residual, delta, weight, eps, pdl, y=out[0], new_residual=out[1])


def rms_norm_quant_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (y, q, scale)."""
    y, q, scale = out
    launch_norm(
        "rms_norm_quant", x, None, None, weight, eps, pdl, y=y if keep else None, q=q, scale=scale, rotate=rotate
    )


def add_rms_norm_quant_launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    delta: Optional[torch.Tensor],
    weight: torch.Tensor,
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
        "add_rms_norm_quant", x, residual, delta, weight, eps, pdl, y=y if keep else None, q=q, scale=scale,
        new_residual=new_residual, rotate=rotate,
    )  # fmt: skip


rms_norm = register("rms_norm", rms_norm_reference, rms_norm_fake, rms_norm_launch, kind="norm", family="norm")
add_rms_norm = register(
    "add_rms_norm", add_rms_norm_reference, add_rms_norm_fake, add_rms_norm_launch, kind="norm", family="norm"
)
rms_norm_quant = register(
    "rms_norm_quant", rms_norm_quant_reference, rms_norm_quant_fake, rms_norm_quant_launch, kind="norm", family="norm"
)
add_rms_norm_quant = register(
    "add_rms_norm_quant",
    add_rms_norm_quant_reference,
    add_rms_norm_quant_fake,
    add_rms_norm_quant_launch,
    kind="norm",
    family="norm",
)
