"""`linear_8bit_silu_mul`: silu(gate) * up of a packed [gate | up] projection, without writing the projection.

One launch of the wide kernel if the table has one that is faster (`kernel_selection.activation_config`), else
`linear_8bit` and `silu_mul`.
"""

from typing import Optional

import torch

from ..core.device import multiprocessors
from ..core.registry import register
from ..core.reproducible_sums import silu_in_fp32
from ..core.triton_support import INTERPRETED
from ..elementwise.silu_mul import silu_mul_launch
from .kernel_selection import activation_config, work_split
from .kernel_wide import launch_wide
from .linear_8bit import check_shapes, matmul_8bit
from .linear_8bit import launch as launch_linear


def reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return h [..., I] of `out_dtype` for q [..., K] and weight [2I, K], both e4m3 or both int8.

    scale [...] and weight_scale [2I] are fp32, delta is [..., 2I]. The first I rows of the weight are the gate.
    Everything is fp32 and rounded once.
    """
    _check(q, weight, weight_scale)
    y = matmul_8bit(q, weight) * scale.unsqueeze(-1) * weight_scale
    gate, up = (y if delta is None else y + delta.float()).chunk(2, dim=-1)
    return (silu_in_fp32(gate) * up).to(out_dtype)


def fake(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return an empty result."""
    _check(q, weight, weight_scale)
    return q.new_empty((*q.shape[:-1], weight.shape[0] // 2), dtype=out_dtype)


def _check(q: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    check_shapes(q, weight, weight_scale)
    if weight.shape[0] % 2:
        raise ValueError(
            f"linear_8bit_silu_mul: weight {tuple(weight.shape)} must have an even number of rows, half gate, half up"
        )


def launch(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (h,); K must be a multiple of 16. `sm_budget` limits the kernel to that many SMs."""
    n, k = weight.shape
    h = out[0].view(-1, n // 2)
    tokens = h.shape[0]
    if tokens == 0:
        return
    x, token_scale = q.reshape(-1, k), scale.reshape(-1)
    added = None if delta is None else delta.reshape(-1, n)
    sms = multiprocessors(q.device)
    config = activation_config(tokens, n, k, int8=q.dtype == torch.int8)
    aligned = not any(tensor.data_ptr() % 16 for tensor in (x, weight, h))
    if config is None or INTERPRETED or not aligned or out_dtype != torch.bfloat16:
        packed = torch.empty(tokens, n, dtype=out_dtype, device=q.device)
        launch_linear(
            x, token_scale, weight, weight_scale, None, None, out_dtype, out=(packed,), sm_budget=sm_budget, pdl=pdl
        )
        silu_mul_launch(packed, added, out=(h,), pdl=pdl)
        return
    split = work_split(config, tokens, n, k, min(sms, sm_budget or sms))
    launch_wide(x, token_scale, weight, weight_scale, added, None, h, config, split, pdl, activate=True)


linear_8bit_silu_mul = register("linear_8bit_silu_mul", reference, fake, launch, kind="linear", family="linear")
