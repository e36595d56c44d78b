"""`expert_lora`: LoRA on the experts for a batch of mixed adapters, as one semantic op that a pass lowers."""

from collections.abc import Sequence
from typing import Any, Optional

import torch

from ..core.registry import register
from ..lora import lora
from ..lora.expand import delta_dtype


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
    count = a.shape[1]
    index = adapter_index.unsqueeze(1)
    groups = torch.where((index < 0) | (experts < 0), -1, index * count + experts).reshape(-1)
    rows = x if pairs_per_row == 1 else x.repeat_interleave(pairs_per_row, 0)
    scales = x_scale if x_scale is None or pairs_per_row == 1 else x_scale.repeat_interleave(pairs_per_row, 0)
    flat_a_scale = None if a_scale is None else a_scale.flatten(0, 1)
    flat_b_scale = None if b_scale is None else b_scale.flatten(0, 1)
    stacks = rows, a.flatten(0, 1), b.flatten(0, 1)
    return lora.reference(*stacks, groups.to(torch.int32), slices, flat_a_scale, flat_b_scale, scales)


def fake(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter_index: torch.Tensor, experts: torch.Tensor, *_: Any
) -> torch.Tensor:
    """Return an empty result."""
    return b.new_empty((experts.shape[0] * experts.shape[1], b.shape[2]), dtype=delta_dtype(b))


def launch(*args: Any, out: tuple[torch.Tensor, ...], sm_budget: int | None = None, pdl: bool = False) -> None:
    """Fill `out`."""
    raise NotImplementedError


expert_lora = register("expert_lora", reference, fake, launch, kind="lora_shrink", family="lora")
