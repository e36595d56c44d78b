"""`expert_lora`: LoRA on the experts for a batch of mixed adapters, as one semantic op that a pass lowers."""

from collections.abc import Sequence
from typing import Any, Optional

import torch

from ..core.registry import register
from ..lora import expand as lora_expand
from ..lora import lora
from ..lora import shrink as lora_shrink
from ..lora.plan import lora_splits
from . import plan
from .grouped_linear import expert_tile
from .plan import MANY_GROUPS, has_single_tiles


def reference(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapter_index: torch.Tensor,
    experts: torch.Tensor,
    slices: Sequence[int],
    pairs_per_row: int,
    a_scale: Optional[torch.Tensor] = None,
    b_scale: Optional[torch.Tensor] = None,
    x_scale: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return delta [T * k, N]: `lora` of each pair, with the stacks of its token's adapter and its expert.

    x              [T, K] with pairs_per_row = k, or [T * k, K] with 1; model dtype, or eight bits with x_scale [rows]
    a              [S, E, n*R, K] model dtype, or eight bits with a_scale [S, E, n*R] fp32
    b              [S, E, N, R] model dtype, or eight bits with b_scale [S, E, N] fp32; includes alpha / rank
    adapter_index  [T] int32, -1 = no adapter: zeros
    experts        [T, k] int32, -1 = none: zeros here, unspecified on a GPU
    slices         the n output widths, adding up to N

    Slot s and expert e are group s * E + e of `lora`.
    """
    groups = plan.expert_groups_reference(adapter_index, experts, a.shape[1])
    rows = x if pairs_per_row == 1 else x.repeat_interleave(pairs_per_row, 0)
    scales = x_scale if x_scale is None or pairs_per_row == 1 else x_scale.repeat_interleave(pairs_per_row, 0)
    flat_a_scale = None if a_scale is None else a_scale.flatten(0, 1)
    flat_b_scale = None if b_scale is None else b_scale.flatten(0, 1)
    stacks = rows, a.flatten(0, 1), b.flatten(0, 1)
    return lora.reference(*stacks, groups, slices, flat_a_scale, flat_b_scale, scales)


def fake(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter_index: torch.Tensor, experts: torch.Tensor, *_: Any
) -> torch.Tensor:
    """Return an empty result."""
    return b.new_empty((experts.shape[0] * experts.shape[1], b.shape[2]), dtype=lora_expand.delta_dtype(b))


def pair_tile(num_pairs: int, num_groups: int) -> int:
    """Return the tile height of LoRA's plan of pairs, up to 64: 1 or 8 if few pairs or hardly any share a group."""
    if has_single_tiles(num_pairs, num_groups) or num_pairs <= min(num_groups, MANY_GROUPS):
        return 1
    return 8 if num_pairs <= 4 * num_groups else min(64, expert_tile(num_pairs, num_groups))


def launch(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapter_index: torch.Tensor,
    experts: torch.Tensor,
    slices: Sequence[int],
    pairs_per_row: int,
    a_scale: Optional[torch.Tensor] = None,
    b_scale: Optional[torch.Tensor] = None,
    x_scale: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Run plan, shrink and expand, for graphs that are not lowered by a pass."""
    count, pairs = a.shape[0] * a.shape[1], experts.numel()
    tile, splits = pair_tile(pairs, count), lora_splits(x.shape[1], pairs)
    groups = plan.expert_groups_fake(adapter_index, experts, a.shape[1])
    plan.expert_groups_launch(adapter_index, experts, a.shape[1], out=(groups,), sm_budget=sm_budget, pdl=pdl)
    sorted_pairs = plan.group_plan_fake(groups, count, tile)
    plan.group_plan_launch(groups, count, tile, out=sorted_pairs, sm_budget=sm_budget)
    flat_a_scale, flat_b_scale = (None if each is None else each.flatten(0, 1) for each in (a_scale, b_scale))
    shrink = x, a.flatten(0, 1), *sorted_pairs, tile, splits, flat_a_scale, x_scale, pairs_per_row
    planes = lora_shrink.fake(*shrink)
    lora_shrink.launch(*shrink, out=(planes,), sm_budget=sm_budget)
    expand = planes, b.flatten(0, 1), *sorted_pairs, tile, slices, flat_b_scale
    lora_expand.launch(*expand, out=out, sm_budget=sm_budget, pdl=True)


expert_lora = register("expert_lora", reference, fake, launch, kind="lora_shrink", family="lora")
