"""`expert_linear` and `expert_linear_8bit`: a linear of each pair's expert, as semantic ops that a pass lowers."""

import torch

from ..core.registry import register
from ..core.reproducible_sums import product
from .grouped_linear import expert_tile, grouped_linear_8bit_launch, grouped_linear_launch
from .plan import group_plan_fake, group_plan_launch


def pairs_of_experts(experts: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return (expert, its pairs in ascending order) for the experts that experts [T, k] names, without -1."""
    flat = experts.reshape(-1)
    return [(each, (flat == each).nonzero().squeeze(1)) for each in flat.unique().tolist() if each >= 0]


def plan_pairs(
    experts: torch.Tensor, num_experts: int, sm_budget: int | None, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Run the plan of experts [T, k] for a graph that no pass lowered, and return (order, tiles, tile)."""
    pairs = experts.reshape(-1)
    tile = expert_tile(pairs.shape[0], num_experts)
    order, tiles = group_plan_fake(pairs, num_experts, tile)
    group_plan_launch(pairs, num_experts, tile, out=(order, tiles), sm_budget=sm_budget, pdl=pdl)
    return order, tiles, tile


def expert_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, pairs_per_row: int
) -> torch.Tensor:
    """Return y [T * k, N]: row p is weight[expert of pair p] @ x[p // pairs_per_row].

    x              [T, K] with pairs_per_row = k (a row for each token), or [T * k, K] with 1 (a row for each pair)
    weight         [E, N, K] in x's dtype
    experts        [T, k] int32; -1: none, and the row of y is unspecified (0 here)
    """
    y = expert_linear_fake(x, weight, experts, pairs_per_row).zero_()
    for expert, pairs in pairs_of_experts(experts):
        y[pairs] = product(x[pairs // pairs_per_row], weight[expert], x.dtype)
    return y


def expert_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, pairs_per_row: int
) -> torch.Tensor:
    """Return an empty result."""
    return x.new_empty((experts.shape[0] * experts.shape[1], weight.shape[1]))


def expert_linear_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    pairs_per_row: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Run plan and `grouped_linear`, for graphs that are not lowered by a pass."""
    plan = plan_pairs(experts, weight.shape[0], sm_budget, pdl)
    grouped_linear_launch(x, weight, *plan, pairs_per_row, out=out, sm_budget=sm_budget)


expert_linear = register(
    "expert_linear",
    expert_linear_reference,
    expert_linear_fake,
    expert_linear_launch,
    kind="linear",
    family="moe",
    gathers="weight",
)


def expert_linear_8bit_reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    experts: torch.Tensor,
    pairs_per_row: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return y [T * k, N] of `out_dtype`: row p is weight[e] @ q[r] * scale[r] * weight_scale[e], rounded once.

    e is the expert of pair p and r = p // pairs_per_row. q [T or T * k, K] and weight [E, N, K] are both e4m3 or both
    int8, scale [T or T * k] and weight_scale [E, N] fp32. Otherwise as `expert_linear`. int8 sums are exact.
    """
    y = expert_linear_8bit_fake(q, scale, weight, weight_scale, experts, pairs_per_row, out_dtype).zero_()
    for expert, pairs in pairs_of_experts(experts):
        rows = pairs // pairs_per_row
        sums = product(q[rows], weight[expert], torch.float32)
        y[pairs] = (sums * scale[rows].unsqueeze(1) * weight_scale[expert]).to(out_dtype)
    return y


def expert_linear_8bit_fake(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    experts: torch.Tensor,
    pairs_per_row: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return an empty result."""
    return q.new_empty((experts.shape[0] * experts.shape[1], weight.shape[1]), dtype=out_dtype)


def expert_linear_8bit_launch(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    experts: torch.Tensor,
    pairs_per_row: int,
    out_dtype: torch.dtype,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Run plan and `grouped_linear_8bit`, for graphs that are not lowered by a pass."""
    plan = plan_pairs(experts, weight.shape[0], sm_budget, pdl)
    grouped_linear_8bit_launch(
        q, scale, weight, weight_scale, None, *plan, pairs_per_row, out_dtype, out=out, sm_budget=sm_budget
    )


expert_linear_8bit = register(
    "expert_linear_8bit",
    expert_linear_8bit_reference,
    expert_linear_8bit_fake,
    expert_linear_8bit_launch,
    kind="linear",
    family="moe",
    gathers="weight",
)
