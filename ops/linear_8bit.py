"""linear_8bit: y = (q @ W^T) * scale * weight_scale (+ delta + residual), e4m3 or int8 operands, one scale per token and per output channel.

Few tokens are bound by the bytes of the weights and run on our own kernels (`linear_8bit_decode.py`, `linear_8bit_gluon.py`), from 65 tokens on those with
few output tiles on `linear_8bit_wide.py`; many tokens are bound by arithmetic and go to `torch._scaled_mm`, in int8 to `linear_8bit_large.py`. `tuning.py`
says which kernel and which tiles. Products of int8 are summed exactly, in int32: every kernel, and every way to share its work, gives the same sums.
"""
from functools import lru_cache
from typing import Optional

import torch

from .linear_8bit_decode import launch_triton
from .linear_8bit_gluon import launch_gluon
from .linear_8bit_large import launch_large
from .linear_8bit_prefill import launch_scaled_mm, scaled_mm_takes
from .linear_8bit_wide import launch_wide
from .registry import register
from .triton_support import INTERPRETED
from .tuning import H200_SMS, LinearConfig, linear_config, with_addends, without_tma, work_split

DTYPES = (torch.float8_e4m3fn, torch.int8)
MAX_INT8_K = 1 << 17  # products of +-127 (of -128 too) whose sum fits int32
REFERENCE_CHUNK_ELEMENTS = 1 << 24  # weights dequantized at a time by the reference: 64 MB of fp32


def check_shapes(q: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    """Raises ValueError for weights that don't fit the activations."""
    if weight.dim() != 2 or q.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear_8bit: q {tuple(q.shape)} and weight {tuple(weight.shape)} don't fit: expected q [..., K] and weight [N, K]")
    if weight_scale.shape != weight.shape[:1]:
        raise ValueError(f"linear_8bit: weight_scale {tuple(weight_scale.shape)} must hold one value per row of weight {tuple(weight.shape)}")
    if q.dtype != weight.dtype or q.dtype not in DTYPES:
        raise ValueError(f"linear_8bit: q is {q.dtype} and weight {weight.dtype}; both must be torch.float8_e4m3fn or both torch.int8 (see quantize_rowwise)")
    if q.dtype == torch.int8 and weight.shape[1] > MAX_INT8_K:
        raise ValueError(f"linear_8bit: K is {weight.shape[1]}; int8 sums of more than {MAX_INT8_K} products may not fit int32 (use torch.float8_e4m3fn)")


def matmul_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] fp32 @ weight [N, K]^T in fp32, some rows of the weight at a time."""
    rows = max(1, REFERENCE_CHUNK_ELEMENTS // weight.shape[1])
    return torch.cat([x @ chunk.float().t() for chunk in weight.split(rows)], dim=-1)


def reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """q [..., K] and weight [N, K], both e4m3 or both int8, scale [...] and weight_scale [N] fp32, delta and residual [..., N] -> [..., N] of `out_dtype`.

    Everything is summed in fp32 and rounded once.
    """
    check_shapes(q, weight, weight_scale)
    y = matmul_fp32(q.float(), weight)
    y = y * scale.unsqueeze(-1) * weight_scale
    for addend in (delta, residual):
        if addend is not None:
            y = y + addend.float()
    return y.to(out_dtype)


def fake(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    check_shapes(q, weight, weight_scale)
    return q.new_empty((*q.shape[:-1], weight.shape[0]), dtype=out_dtype)


def launch(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Writes `out[0]`; K must be a multiple of 16. `sm_budget` limits the kernels to that many SMs."""
    n, k = weight.shape
    if k % 16:
        raise ValueError(f"linear_8bit: K is {k}; it must be a multiple of 16 (pad the activations and the weight with zeros)")
    y = out[0].view(-1, n)
    tokens = y.shape[0]
    if tokens == 0:
        return
    x, token_scale = q.reshape(-1, k), scale.reshape(-1)
    addends = [None if t is None else t.reshape(-1, n) for t in (delta, residual)]
    sms = multiprocessors(q.device)
    config = linear_config(tokens, n, k, sms, scaled_mm=scaled_mm_takes(n, k, out_dtype) and not INTERPRETED, int8=q.dtype == torch.int8)
    if config.kernel in ("gluon", "wide", "large") and (INTERPRETED or any(tensor.data_ptr() % 16 for tensor in (x, weight, y))):
        config = without_tma(config)
    launch_config(config, x, token_scale, weight, weight_scale, addends[0], addends[1], y, sms=sms, sm_budget=sm_budget, pdl=pdl)


def launch_config(
    config: LinearConfig,
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    out: torch.Tensor,
    *,
    sms: int,
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Runs one given configuration on [T, K] activations (the tuner's door; `launch` picks the configuration)."""
    if config.kernel == "scaled_mm":
        launch_scaled_mm(q, scale, weight, weight_scale, delta, residual, out, sms_left_free=0 if sm_budget is None else sms - sm_budget)
        return
    if config.kernel == "large" and (delta is not None or residual is not None):
        config = with_addends(config)
    run = {"gluon": launch_gluon, "wide": launch_wide, "large": launch_large, "triton": launch_triton}[config.kernel]
    split = work_split(config, q.shape[0], weight.shape[0], weight.shape[1], min(sms, sm_budget or sms))
    run(q, scale, weight, weight_scale, delta, residual, out, config, split, pdl)


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """SMs of `device`; the interpreter pretends to have an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else H200_SMS


linear_8bit = register("linear_8bit", reference, fake, launch)
