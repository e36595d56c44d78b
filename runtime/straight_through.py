"""`straight_through`: an exact value with the gradient of an approximation."""

from typing import Any

import torch


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        return exact.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def straight_through(approximate: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the values of `exact`; the gradient goes to `approximate`.

    approximate   what the trainer's model computes, such as log-probabilities, any shape and floating dtype
    exact         the same as the engine computes it: same shape; converted to the dtype and device of `approximate`

    `approximate + (exact - approximate).detach()` is another function: its sum rounds, so that its values are not those
    of `exact`.

    Raises ValueError for other shapes, and for a dtype of `approximate` that would round `exact`.
    """
    if approximate.shape != exact.shape:
        shapes = f"approximate has shape {list(approximate.shape)}, exact {list(exact.shape)}"
        raise ValueError(f"{shapes}; give both the same shape")
    if torch.promote_types(approximate.dtype, exact.dtype) != approximate.dtype:
        raise ValueError(
            f"approximate has dtype {approximate.dtype}, which would round exact's {exact.dtype}; give "
            f"approximate.to({exact.dtype})"
        )
    result: torch.Tensor = _StraightThrough.apply(approximate, exact.detach().to(approximate))
    return result
