"""Every rank's columns side by side: the logits of a vocabulary that is split over the ranks."""

from typing import Optional

import torch

from ..core.registry import register
from .tensor_parallel_group import group_named


def reference(part: torch.Tensor, group: str, columns: int) -> torch.Tensor:
    """part [..., N] of each rank of `group` -> [..., columns], in rank order; what the last ranks have beyond `columns`
    fills up their parts and is left out.
    """
    whole = torch.cat(group_named(group).gather(part), dim=-1)
    return whole if whole.shape[-1] == columns else whole[..., :columns].contiguous()


def fake(part: torch.Tensor, group: str, columns: int) -> torch.Tensor:
    """The result of `reference`, not filled."""
    return part.new_empty((*part.shape[:-1], columns))


def launch(
    part: torch.Tensor,
    group: str,
    columns: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (columns of all ranks,): they come through the group's process group (NCCL between GPUs). Does not
    heed `sm_budget`.
    """
    out[0].copy_(reference(part, group, columns))


all_gather = register("all_gather", reference, fake, launch, kind="collective", family="collective")
