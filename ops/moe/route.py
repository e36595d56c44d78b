"""`moe_route`: the experts of each token and their weights, from the router's logits."""

from typing import Any, Optional

import torch

from ..core.registry import register
from ..core.reproducible_sums import exponential, product, sum_in_order


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    delta: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    top_k: int,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` experts of each token with the largest logits x W^T (+ delta), and their weights.

    x             [T, H] model dtype
    weight        [E, H] in x's dtype
    delta         [T, E] LoRA of the router, or None
    slot_mapping  [T] int32; -1: padding, which has no experts
    normalize     weights are the softmax over the chosen logits; otherwise the chosen of the softmax over all

    Returns (experts [T, top_k] int32 in descending order of weight, -1 for padding; weights [T, top_k] fp32, 0 for
    padding). Logits are summed and kept in fp32. Of equal logits the lower expert is first.
    """
    logits = product(x, weight, torch.float32)
    if delta is not None:
        logits = logits + delta.float()
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = logits.gather(1, order)
    powers = exponential(logits - chosen[:, :1])
    own = powers.gather(1, order)
    total = own if normalize else powers
    weights = (own / sum_in_order(total)).float()
    padding = (slot_mapping < 0).unsqueeze(1)
    return order.to(torch.int32).masked_fill(padding, -1), weights.masked_fill(padding, 0.0)


def fake(
    x: torch.Tensor, weight: torch.Tensor, delta: Any, slot_mapping: Any, top_k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


def launch(*args: Any, out: tuple[torch.Tensor, ...], sm_budget: int | None = None, pdl: bool = False) -> None:
    """Fill `out`."""
    raise NotImplementedError


moe_route = register("moe_route", reference, fake, launch, kind="rows", family="moe")
