"""`moe_combine`: the weighted sum of the results of a token's experts."""

from typing import Any, Optional

import torch

from ..core.registry import register


def reference(z: torch.Tensor, weights: torch.Tensor, delta: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Return y [T, N]: the sum over j of weights[t, j] * (z + delta)[t * k + j], in this order in fp32, rounded once.

    z              [T * k, N] model dtype
    weights        [T, k] fp32; rows of weight 0 are not read
    delta          [T * k, N] of the adapters, or None
    """
    tokens, top_k = weights.shape
    total = torch.zeros(tokens, z.shape[1], device=z.device)
    for j in range(top_k):
        rows = z[j::top_k].float()
        if delta is not None:
            rows = rows + delta[j::top_k].float()
        weight = weights[:, j : j + 1]
        total = torch.where(weight == 0, total, total + weight * rows)
    return total.to(z.dtype)


def fake(z: torch.Tensor, weights: torch.Tensor, delta: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Return an empty result."""
    return z.new_empty((weights.shape[0], z.shape[1]))


def launch(*args: Any, out: tuple[torch.Tensor, ...], sm_budget: int | None = None, pdl: bool = False) -> None:
    """Fill `out`."""
    raise NotImplementedError


moe_combine = register("moe_combine", reference, fake, launch, kind="rows", family="moe")
