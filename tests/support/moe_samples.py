"""Sample inputs of the ops of mixtures of experts, and of routings; importing this module registers them."""

from typing import Any

import torch
from sidestream.ops.elementwise.quantize import reference as quantize_rowwise_reference

from support.samples import BF16, FP16, eight_bit, normal, samples


def routed(
    tokens: int, num_experts: int, top_k: int, padding: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random experts [T, k] int32, different ones for a token, and weights [T, k] fp32; the last rows are padding."""
    scores = torch.rand(tokens, num_experts, device=device)
    weights, experts = scores.softmax(1).topk(top_k)
    real = tokens - padding
    experts[real:], weights[real:] = -1, 0.0
    return experts.to(torch.int32), weights


def combined(
    tokens: int,
    top_k: int,
    width: int,
    delta: bool,
    dtype: torch.dtype = BF16,
    padding: int = 0,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """z, weights and delta of a weighted sum; rows of padding hold NaN."""
    weights = routed(tokens, 2 * top_k, top_k, padding, device)[1]
    parts = [torch.randn(tokens * top_k, width, device=device).to(dtype) for _ in range(2)]
    for part in parts:
        part[(tokens - padding) * top_k :] = float("nan")
    return parts[0], weights, parts[1] if delta else None


def router_inputs(
    tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    normalize: bool,
    *,
    delta: bool = False,
    dtype: torch.dtype = BF16,
    padding: int = 0,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Arguments of `moe_route` with logits of order 1; the last rows are padding."""
    slots = torch.arange(tokens, dtype=torch.int32, device=device)
    slots[tokens - padding :] = -1
    return (
        torch.randn(tokens, hidden, device=device).to(dtype),
        (torch.randn(num_experts, hidden, device=device) / hidden**0.5).to(dtype),
        torch.randn(tokens, num_experts, device=device).to(dtype) if delta else None,
        slots,
        top_k,
        normalize,
    )


@samples("moe_route")
def _moe_route() -> list[tuple[Any, ...]]:
    return [
        router_inputs(5, 32, 8, 2, True, padding=1),
        router_inputs(3, 24, 16, 4, False, delta=True, dtype=torch.float32),
    ]


@samples("moe_combine")
def _moe_combine() -> list[tuple[Any, ...]]:
    return [combined(3, 2, 24, False), combined(5, 4, 16, True, torch.float32)]


@samples("combine_add_rms_norm")
def _combine_add_rms_norm() -> list[tuple[Any, ...]]:
    return [(*combined(3, 2, 24, True), normal(3, 24, dtype=dtype), normal(24), 1e-5) for dtype in (BF16, FP16)]


@samples("combine_add_rms_norm_quant")
def _combine_add_rms_norm_quant() -> list[tuple[Any, ...]]:
    return [
        (*combined(3, 2, 24, not keep), normal(3, 24, dtype=dtype), normal(24), 1e-5, keep, torch.int8, 8)
        for keep in (True, False)
        for dtype in (BF16, FP16)
    ]


@samples("group_plan")
def _group_plan() -> list[tuple[Any, ...]]:
    groups = torch.tensor([1, -1, 0, 1, 3], dtype=torch.int32)
    return [(groups, 4, 16), (groups, 2000, 16), (torch.full((40,), 2, dtype=torch.int32), 3, 16)]


@samples("expert_groups")
def _expert_groups() -> list[tuple[Any, ...]]:
    return [(torch.tensor([1, -1, 0], dtype=torch.int32), routed(3, 8, 2, 1)[0], 8)]


@samples("expert_linear")
def _expert_linear() -> list[tuple[Any, ...]]:
    experts = routed(5, 8, 2, 1)[0]
    return [(normal(5, 32), normal(8, 24, 32), experts, 2), (normal(10, 32), normal(8, 24, 32), experts, 1)]


@samples("expert_linear_8bit")
def _expert_linear_8bit() -> list[tuple[Any, ...]]:
    experts, weight = routed(5, 8, 2, 1)[0], eight_bit(8, 24, 32, dtype=torch.int8)
    return [(*eight_bit(rows, 32, dtype=torch.int8), *weight, experts, 10 // rows, BF16) for rows in (5, 10)]


@samples("expert_lora")
def _expert_lora() -> list[tuple[Any, ...]]:
    index = torch.tensor([0, -1, 2, 2, 1], dtype=torch.int32)
    experts = routed(5, 8, 2, 1)[0]
    x, a, b = normal(5, 32), normal(3, 8, 32, 32), normal(3, 8, 40, 16)
    (q, x_scale), (qa, a_scale), (qb, b_scale) = (quantize_rowwise_reference(each, torch.int8) for each in (x, a, b))
    return [
        (x, a, b, index, experts, [24, 16], 2),
        (q, qa, qb, index, experts, [24, 16], 2, a_scale, b_scale, x_scale),
        (normal(10, 32), a[:, :, :16].contiguous(), b, index, experts, [40], 1),
    ]
