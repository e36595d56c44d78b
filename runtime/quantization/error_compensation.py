"""Rounds a weight so that its product with typical inputs changes least (GPTQ, arXiv 2210.17323).

Columns are rounded one after another. Later columns compensate the error to the extent that the inputs correlate.
"""

from typing import NamedTuple

import torch

from ...ops.core.dtypes import QUANTIZED_MAX
from ...ops.elementwise.quantize import to_steps

DAMPING = 0.01  # share of the mean added to the diagonal, so that rare directions have little weight
BLOCK = 128  # columns whose errors are propagated in one product


class Compensation(NamedTuple):
    """Error propagation for one linear.

    order  int64 [K]: columns in the order of rounding, largest inputs first
    upper  fp32 [K, K]: the upper Cholesky factor of the inverse of X^T X, damped, in that order
    """

    order: torch.Tensor
    upper: torch.Tensor


def compensation(products: torch.Tensor) -> Compensation:
    """Return the compensation for X^T X, fp32 [K, K], of the inputs X [tokens, K]. Needs three fp64 matrices."""
    sizes = products.diagonal()
    order = torch.argsort(sizes, descending=True, stable=True)
    ordered = products[order][:, order].double()
    ordered.diagonal().add_(max(DAMPING * float(sizes.double().mean()), 1e-12))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(ordered))
    return Compensation(order, torch.linalg.cholesky(inverse, upper=True).float())


def round_rows(weight: torch.Tensor, how: Compensation, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values [N, K] of int8 or e4m3, fp32 scales [N]) of a weight fp32 [N, K]. Rows are independent, and their
    scales are those of rounding to nearest.
    """
    scale = weight.abs().amax(-1).clamp_min(1e-12) / QUANTIZED_MAX[dtype]
    left = weight.t()[how.order].contiguous()  # contiguous columns
    values = torch.empty_like(left, dtype=dtype)
    for first in range(0, len(left), BLOCK):
        last = min(first + BLOCK, len(left))
        columns, upper = left[first:last], how.upper[first:last]
        errors = torch.empty_like(columns)
        for place in range(last - first):
            values[first + place] = to_steps(columns[place], scale, dtype)
            factors = upper[place, first + place : last]
            errors[place] = (columns[place] - values[first + place].float() * scale) / factors[0]
            columns[place + 1 :] -= torch.outer(factors[1:], errors[place])
        left[last:] -= upper[:, last:].t() @ errors
    restored = torch.empty_like(values)
    restored[how.order] = values
    return restored.t().contiguous(), scale
