"""Every rank's columns side by side: the logits of a vocabulary that is split over the ranks."""

from typing import Optional

import torch

from ..core.registry import register
from .group import group_named, world_of


def reference(part: torch.Tensor, group: str) -> torch.Tensor:
    """part [..., N] of each rank of `group` -> [..., world * N], in rank order."""
    return torch.cat(group_named(group).gather(part), dim=-1)


def fake(part: torch.Tensor, group: str) -> torch.Tensor:
    """The result of `reference`, not filled."""
    return part.new_empty((*part.shape[:-1], part.shape[-1] * world_of(group)))


def launch(
    part: torch.Tensor,
    group: str,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (columns of all ranks,): they come through the group's process group (NCCL between GPUs). Does not
    heed `sm_budget`.
    """
    out[0].copy_(reference(part, group))


all_gather = register("all_gather", reference, fake, launch, kind="collective", family="collective")
