"""On a CPU a single row in 16 bits is multiplied as two.

From 2.15 on torch has a kernel of its own for one row, whose sums round otherwise than those of several rows. An answer
would depend on whether it is alone in its step.
"""

from collections.abc import Sequence
from typing import Any

import torch

PRODUCTS = frozenset({"aten.linear.default", "aten.mm.default"})
HALVES = (torch.bfloat16, torch.float16)


def is_one_row(op: str, args: Sequence[Any]) -> bool:
    """Whether a step is the product of one row in 16 bits: its first argument is [1, K]."""
    return op in PRODUCTS and len(args) > 0 and args[0].dim() == 2 and len(args[0]) == 1 and args[0].dtype in HALVES


def as_two_rows(overload: torch._ops.OpOverload, row: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """[1, N]: what the product of several rows has for this one, [1, K]."""
    product: torch.Tensor = overload(row.expand(2, -1), *others, **named)
    return product[:1]
