"""The weighted sum of a token's rows, one of each of its experts, as a part of other ops."""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.triton_support import in_fp32


def weighted_rows_reference(z: torch.Tensor, weights: torch.Tensor, delta: Optional[torch.Tensor]) -> torch.Tensor:
    """Return fp32 [T, N]: the sum over j of weights[t, j] * (z + delta)[t * k + j], in this order.

    z and delta are [T * k, N], weights [T, k] fp32. Rows of weight 0 are not read.
    """
    tokens, top_k = weights.shape
    total = torch.zeros(tokens, z.shape[1], device=z.device)
    for j in range(top_k):
        rows = z[j::top_k].float()
        if delta is not None:
            rows = rows + delta[j::top_k].float()
        weight = weights[:, j : j + 1]
        total = torch.where(weight == 0, total, total + weight * rows)
    return total


@triton.jit
def weighted_rows(z, delta, weights, token, column, WIDTH: tl.constexpr, TOP_K: tl.constexpr, HAS_DELTA: tl.constexpr):
    """Return the sum of `weighted_rows_reference` for columns of one token, fp32."""
    total = tl.zeros(column.shape, tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + j)
        at = (token * TOP_K + j) * WIDTH + column
        read = column < tl.where(weight != 0, WIDTH, 0)  # the rows of padding hold anything, NaN too
        rows = in_fp32(tl.load(z + at, mask=read, other=0.0))
        if HAS_DELTA:
            rows += in_fp32(tl.load(delta + at, mask=read, other=0.0))
        total += weight * rows
    return total
