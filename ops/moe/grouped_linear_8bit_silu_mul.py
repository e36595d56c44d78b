"""`grouped_linear_8bit_silu_mul`: silu(gate) * up of each pair's expert, without writing gate and up.

For steps without LoRA. `grouped_linear_8bit` with a packed [gate | up] weight followed by `silu_mul` is the other form,
which rounds gate and up to the result's dtype in between.
"""

import torch

from ..core.registry import register
from ..core.reproducible_sums import product, silu_in_fp32
from ..lora.plan import pairs_of_groups
from .grouped_linear import check_8bit, check_shapes, run_grouped


def reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    pairs_per_row: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return h [P, I] of `out_dtype`: row p is silu(gate) * up, with y = weight[g] @ q[r] * scale[r] * weight_scale[g].

    weight [E, 2I, K] and weight_scale [E, 2I]: the first I rows of an expert are the gate, the others up. Everything
    is fp32 and rounded once. Rows of group -1 are unspecified. The other arguments are those of `grouped_linear_8bit`.
    """
    h = fake(q, scale, weight, weight_scale, order, tiles, tile, pairs_per_row, out_dtype).zero_()
    for group, pairs in pairs_of_groups(order, tiles):
        rows = pairs // pairs_per_row
        y = product(q[rows], weight[group], torch.float32) * scale[rows].unsqueeze(1) * weight_scale[group]
        gate, up = y.chunk(2, dim=1)
        h[pairs] = (silu_in_fp32(gate) * up).to(out_dtype)
    return h


def fake(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    pairs_per_row: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return an empty result."""
    check_shapes("grouped_linear_8bit_silu_mul", q, weight, order, tiles, pairs_per_row)
    check_8bit("grouped_linear_8bit_silu_mul", scale, q, weight, weight_scale)
    if weight.shape[1] % 2:
        raise ValueError(
            f"grouped_linear_8bit_silu_mul: weight {tuple(weight.shape)} must have an even number of rows for each "
            "expert, half gate, half up"
        )
    return q.new_empty((order.shape[0], weight.shape[1] // 2), dtype=out_dtype)


def launch(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    pairs_per_row: int,
    out_dtype: torch.dtype,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (h,), except rows of group -1; K must be a multiple of 16. `sm_budget` limits the kernel's SMs."""
    run_grouped(
        "grouped_linear_8bit_silu_mul", q, scale, weight, weight_scale, None, order, tiles, tile, pairs_per_row, out[0],
        True, sm_budget, pdl,
    )  # fmt: skip


grouped_linear_8bit_silu_mul = register(
    "grouped_linear_8bit_silu_mul", reference, fake, launch, kind="linear", family="moe", gathers="weight"
)
