"""How ops hold the residual stream, and what is read from it and rounded to it.

A stream has the model's dtype and holds its values as they are, with one exception: a stream in fp16 of a model in bf16
(the dtype of the norms' weights, and of all activations but the stream) holds them divided by RESIDUAL_SCALE. fp16
has eight times finer steps than bf16 in as many bytes, but ends at 65,504, and streams of real models reach further.
Sixteenths reach 1,048,064, and a value from 0.001 on keeps all of fp16's 11 bits. A value beyond the end is rounded to
the end, never to infinity; NaN stays NaN.

The scale is a power of two, so that dividing by it rounds nothing. Every kernel that touches the stream computes in
fp32: the stream's form costs no bytes and no launch.
"""

import torch
import triton
import triton.language as tl

from .triton_support import in_fp32, rounded_to

QUANTIZED_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
RESIDUAL_SCALE = 16.0
RESIDUAL_LARGEST = 65504.0  # of what is stored: fp16's largest number
_SCALE, _LARGEST = tl.constexpr(RESIDUAL_SCALE), tl.constexpr(RESIDUAL_LARGEST)


def is_scaled(stream: torch.dtype, model: torch.dtype) -> bool:
    """Whether a residual stream of this dtype, in a model of that one, holds its values over RESIDUAL_SCALE."""
    return stream == torch.float16 and model == torch.bfloat16


def residual_in_fp32(residual: torch.Tensor, model: torch.dtype) -> torch.Tensor:
    """The values of a residual stream of any dtype, in fp32."""
    values = residual.float()
    return values * RESIDUAL_SCALE if is_scaled(residual.dtype, model) else values


def round_residual(values: torch.Tensor, stream: torch.dtype, model: torch.dtype) -> torch.Tensor:
    """fp32 values as a residual stream of dtype `stream` holds them."""
    if not is_scaled(stream, model):
        return values.to(stream)
    return (values / RESIDUAL_SCALE).clamp(-RESIDUAL_LARGEST, RESIDUAL_LARGEST).to(stream)


@triton.jit
def of_residual(held, model: tl.constexpr):
    """`residual_in_fp32` of what a kernel has loaded from a stream."""
    values = in_fp32(held)
    if held.dtype == tl.float16 and model == tl.bfloat16:
        values *= _SCALE
    return values


@triton.jit
def as_residual(values, stream: tl.constexpr, model: tl.constexpr):
    """(what a stream of dtype `stream` holds of fp32 values, the values that it holds in fp32)."""
    if stream == tl.float16 and model == tl.bfloat16:
        scaled = values * (1.0 / _SCALE)
        scaled = tl.minimum(scaled, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        held = tl.maximum(scaled, -_LARGEST, propagate_nan=tl.PropagateNan.ALL).to(stream)
        return held, held.to(tl.float32) * _SCALE
    else:
        rounded = rounded_to(values, stream)
        return rounded.to(stream), rounded
