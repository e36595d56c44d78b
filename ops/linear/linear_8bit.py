"""`linear_8bit`: y = (q @ W^T) * scale * weight_scale (+ delta + residual), e4m3 or int8, scales per token and output.

Activations may also have one scale per token and 128 columns (`quantize_blocks`), so that no earlier kernel needs the
maximum of a whole row. This form is for few tokens; with many it uses `kernel_gluon.py` and is slower than one scale
per token.

With few tokens a linear is bound by the bytes of the weights and uses `kernel_triton.py` or `kernel_gluon.py`; from 65
tokens on, linears with few output tiles use `kernel_wide.py`; with many tokens a linear is bound by arithmetic and uses
`torch._scaled_mm`, in int8 `kernel_large.py`. `kernel_selection.py` chooses kernel and tiles. int8 products are summed
exactly in int32: every kernel, and every division of its work, gives the same sums.
"""

from dataclasses import replace
from typing import Optional

import torch

from ..core.device import multiprocessors
from ..core.registry import register
from ..core.reproducible_sums import product
from ..core.triton_support import INTERPRETED
from ..elementwise.quantize_blocks import BLOCK
from .kernel_gluon import launch_gluon
from .kernel_large import launch_large
from .kernel_selection import LinearConfig, choose_config, linear_config, with_addends, without_tma, work_split
from .kernel_triton import launch_triton
from .kernel_wide import launch_wide
from .scaled_mm import launch_scaled_mm, scaled_mm_takes

DTYPES = (torch.float8_e4m3fn, torch.int8)
BLOCK_SCALE_KERNELS = ("gluon", "triton")
MAX_INT8_K = 1 << 17  # the sum of this number of products of +-127 (or -128) fits int32


def check_shapes(q: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    """Raise ValueError unless the weights match the activations."""
    if weight.dim() != 2 or q.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_8bit: q {tuple(q.shape)} and weight {tuple(weight.shape)} don't match: expected q [..., K] and "
            "weight [N, K]"
        )
    if weight_scale.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_8bit: weight_scale {tuple(weight_scale.shape)} must hold one value per row of weight "
            f"{tuple(weight.shape)}"
        )
    if q.dtype != weight.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"linear_8bit: q is {q.dtype} and weight {weight.dtype}; both must be torch.float8_e4m3fn or both "
            "torch.int8 (see quantize_rowwise)"
        )
    if q.dtype == torch.int8 and weight.shape[1] > MAX_INT8_K:
        raise ValueError(
            f"linear_8bit: K is {weight.shape[1]}; int8 sums of more than {MAX_INT8_K} products may not fit int32 "
            "(use torch.float8_e4m3fn)"
        )


def has_block_scales(q: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether scale is [K / 128, P], for blocks of 128 columns of q [T, K], instead of one value per token.

    Raises ValueError if block scales do not match q.
    """
    if q.dim() != 2 or scale.dim() != 2:
        return False
    if q.shape[1] % BLOCK or scale.shape[0] != q.shape[1] // BLOCK:
        raise ValueError(
            f"linear_8bit: scale {tuple(scale.shape)} doesn't match q {tuple(q.shape)}: expected [K / {BLOCK}, P], K a "
            f"multiple of {BLOCK}, or [T]"
        )
    if scale.shape[1] < q.shape[0]:
        raise ValueError(
            f"linear_8bit: scale {tuple(scale.shape)} has too few columns for {q.shape[0]} tokens; pad them to "
            "padded_scales(T) with zeros"
        )
    return True


def matmul_8bit(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] e4m3, int8 or fp32 @ weight [N, K]^T e4m3 or int8 -> [..., N] fp32, rounded once."""
    return product(x, weight, torch.float32)


def matmul_blocks(q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return q [T, K] @ weight [N, K]^T in fp32, the products of each block of 128 columns times scale [K / 128, P]."""
    total = torch.zeros(q.shape[0], weight.shape[0], device=q.device)
    for x, w, token_scale in zip(q.split(BLOCK, dim=1), weight.split(BLOCK, dim=1), scale, strict=True):
        total += matmul_8bit(x, w) * token_scale[: q.shape[0], None]
    return total


def reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return y [..., N] of `out_dtype` for q [..., K] and weight [N, K], both e4m3 or both int8.

    scale [...] and weight_scale [N] are fp32, delta and residual [..., N]. With q [T, K] scale may be [K / 128, P] of
    `quantize_blocks`; P >= T, and scales past T are ignored. Products are summed exactly, everything else is fp32, and
    the result is rounded once. Raises ValueError for shapes and dtypes that don't match.
    """
    check_shapes(q, weight, weight_scale)
    y = matmul_blocks(q, scale, weight) if has_block_scales(q, scale) else matmul_8bit(q, weight) * scale.unsqueeze(-1)
    y = y * weight_scale
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
    """Return an empty result."""
    check_shapes(q, weight, weight_scale)
    has_block_scales(q, scale)
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
    """Fill `out` = (y,); K must be a multiple of 16. `sm_budget` limits the kernels to that many SMs."""
    n, k = weight.shape
    if k % 16:
        raise ValueError(
            f"linear_8bit: K is {k}; it must be a multiple of 16 (pad the activations and the weight with zeros)"
        )
    y = out[0].view(-1, n)
    tokens = y.shape[0]
    if tokens == 0:
        return
    blocks = has_block_scales(q, scale)
    x, token_scale = q.reshape(-1, k), scale.contiguous() if blocks else scale.reshape(-1)
    addends = [None if t is None else t.reshape(-1, n) for t in (delta, residual)]
    sms = multiprocessors(q.device)
    many = scaled_mm_takes(n, k, out_dtype, q.dtype) and not INTERPRETED
    config = linear_config(tokens, n, k, sms, scaled_mm=many, int8=q.dtype == torch.int8)
    if blocks:
        config = takes_block_scales(config, tokens, n, k, sms)
    in_boxes = (x, weight, y, token_scale) if blocks else (x, weight, y)
    unaligned = any(tensor.data_ptr() % 16 for tensor in in_boxes) or (blocks and token_scale.shape[1] % 4 > 0)
    if config.kernel in ("gluon", "wide", "large") and (INTERPRETED or unaligned):
        config = without_tma(config)
    launch_config(
        config, x, token_scale, weight, weight_scale, addends[0], addends[1], y, sms=sms, sm_budget=sm_budget, pdl=pdl
    )


def takes_block_scales(config: LinearConfig, tokens: int, n: int, k: int, sms: int) -> LinearConfig:
    """Return a configuration that supports block scales: `config` with more registers, or one of another kernel.

    The registers are for a step's product in addition to the sums.
    """
    if config.kernel not in BLOCK_SCALE_KERNELS:
        config = choose_config(tokens, n, k, sms, scaled_mm=False)
    if config.block_n * config.block_t < 128 * 64:
        return config
    return replace(config, max_registers=max(config.max_registers, 168 if config.ctas_per_sm == 1 else 128))


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
    """Run the configuration `config` on activations [T, K] with scales [T] or [K / 128, P]; also used by the tuner."""
    if scale.dim() == 2 and config.kernel not in BLOCK_SCALE_KERNELS:
        raise ValueError(
            f"linear_8bit: the kernel {config.kernel} needs one scale per token; block scales are supported by "
            f"{' and '.join(BLOCK_SCALE_KERNELS)}"
        )
    if config.kernel == "scaled_mm":
        launch_scaled_mm(
            q, scale, weight, weight_scale, delta, residual, out,
            sms_left_free=0 if sm_budget is None else sms - sm_budget,
        )  # fmt: skip
        return
    if config.kernel == "large" and (delta is not None or residual is not None):
        config = with_addends(config)
    run = {"gluon": launch_gluon, "wide": launch_wide, "large": launch_large, "triton": launch_triton}[config.kernel]
    split = work_split(config, q.shape[0], weight.shape[0], weight.shape[1], min(sms, sm_budget or sms))
    run(q, scale, weight, weight_scale, delta, residual, out, config, split, pdl)


linear_8bit = register("linear_8bit", reference, fake, launch, kind="linear", family="linear")
