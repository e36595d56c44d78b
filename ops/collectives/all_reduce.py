"""The sum of every rank's partial result, the same bits on all ranks."""

from typing import Optional

import torch

from ..core.registry import register
from .group import group_named


def reference(partial: torch.Tensor, group: str) -> torch.Tensor:
    """partial [..., H] of each rank of `group` -> their sum, in partial's dtype.

    Added in rank order in fp32 and rounded once, so that all ranks hold the same bits.
    """
    first, *others = group_named(group).gather(partial)
    total = first.to(torch.float32, copy=True)
    for part in others:
        total += part
    return total.to(partial.dtype)


def fake(partial: torch.Tensor, group: str) -> torch.Tensor:
    """The result of `reference`, not filled."""
    return partial.new_empty(partial.shape)


def launch(
    partial: torch.Tensor,
    group: str,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (sum,): the parts come through the group's process group (NCCL between GPUs). Does not heed
    `sm_budget`.
    """
    out[0].copy_(reference(partial, group))


all_reduce = register("all_reduce", reference, fake, launch, kind="collective", family="collective")
