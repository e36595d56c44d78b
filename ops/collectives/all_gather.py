"""`all_gather`: the concatenated columns of all ranks, such as the logits of a sharded vocabulary."""

from typing import Optional

import torch

from ..core.registry import register
from .tensor_parallel_group import group_named


def reference(part: torch.Tensor, group: str, columns: int) -> torch.Tensor:
    """Return all ranks' parts [..., N], concatenated in rank order without padding: [..., columns]."""
    whole = torch.cat(group_named(group).gather(part), dim=-1)
    return whole if whole.shape[-1] == columns else whole[..., :columns].contiguous()


def fake(part: torch.Tensor, group: str, columns: int) -> torch.Tensor:
    """Return an empty result."""
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
    """Fill `out` = (columns of all ranks,) through the process group (NCCL between GPUs). Ignores `sm_budget`."""
    out[0].copy_(reference(part, group, columns))


all_gather = register("all_gather", reference, fake, launch, kind="collective", family="collective")
