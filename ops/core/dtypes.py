"""Quantized dtypes, and the dtype of the residual stream.

QUANTIZED_MAX maps a quantized dtype to its largest value.

A residual stream has the model's dtype, with one exception: in a bf16 model it may be fp16, divided by RESIDUAL_SCALE.
fp16 has eight times finer steps than bf16 in as many bytes, but its largest number is 65,504, and streams of real
models have larger values. Scaled values can be up to 1,048,064, and those above 0.001 have all 11 bits of fp16. Larger
values saturate and never become infinite; NaN stays NaN.

The scale is a power of two, so dividing by it rounds nothing. Kernels compute in fp32, so scaling costs no bytes and no
launch. `model` is the dtype of the norms' weights and of all other activations.
"""

import torch
import triton
import triton.language as tl

from .triton_support import in_fp32, rounded_to

QUANTIZED_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
RESIDUAL_SCALE = 16.0
RESIDUAL_LARGEST = 65504.0  # fp16's largest number, for stored values
_SCALE, _LARGEST = tl.constexpr(RESIDUAL_SCALE), tl.constexpr(RESIDUAL_LARGEST)


def is_scaled(stream: torch.dtype, model: torch.dtype) -> bool:
    """Return whether a residual stream of dtype `stream` in a model of dtype `model` is divided by RESIDUAL_SCALE."""
    return stream == torch.float16 and model == torch.bfloat16


def residual_in_fp32(residual: torch.Tensor, model: torch.dtype) -> torch.Tensor:
    """Return the unscaled values of a residual stream in fp32."""
    values = residual.float()
    return values * RESIDUAL_SCALE if is_scaled(residual.dtype, model) else values


def round_residual(values: torch.Tensor, stream: torch.dtype, model: torch.dtype) -> torch.Tensor:
    """Return fp32 values rounded to a residual stream of dtype `stream`, scaled if necessary."""
    if not is_scaled(stream, model):
        return values.to(stream)
    return (values / RESIDUAL_SCALE).clamp(-RESIDUAL_LARGEST, RESIDUAL_LARGEST).to(stream)


@triton.jit
def of_residual(held, model: tl.constexpr):
    """Return the unscaled fp32 values of a loaded residual (`residual_in_fp32` for kernels)."""
    values = in_fp32(held)
    if held.dtype == tl.float16 and model == tl.bfloat16:
        values *= _SCALE
    return values


@triton.jit
def as_residual(values, stream: tl.constexpr, model: tl.constexpr):
    """Return (values rounded to a stream of dtype `stream`, the unscaled rounded values in fp32)."""
    if stream == tl.float16 and model == tl.bfloat16:
        scaled = values * (1.0 / _SCALE)
        scaled = tl.minimum(scaled, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        held = tl.maximum(scaled, -_LARGEST, propagate_nan=tl.PropagateNan.ALL).to(stream)
        return held, held.to(tl.float32) * _SCALE
    else:
        rounded = rounded_to(values, stream)
        return rounded.to(stream), rounded
