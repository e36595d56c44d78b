"""`grouped_linear` and `grouped_linear_8bit`: a linear whose weight differs by group of pairs, such as by expert.

`group_plan` sorts the pairs by group and divides them into tiles. The pairs of a tile share one group, so its weight is
one operand of one matrix product (`kernel_triton.py`). int8 products are summed exactly in int32, so a pair's result
does not depend on the other pairs of its tile.
"""

from typing import Optional

import torch

from ..core.registry import register
from ..core.reproducible_sums import product
from ..core.triton_support import require_contiguous
from ..linear.linear_8bit import DTYPES, MAX_INT8_K
from ..lora.plan import pairs_of_groups
from .kernel_triton import TILES, grouped_config, launch_grouped


def expert_tile(num_pairs: int, num_experts: int) -> int:
    """Return the tile height (16 to 128 pairs): small if tiles of the mean expert would be mostly padding."""
    for tile in (16, 32, 64):
        if num_pairs <= tile * num_experts:
            return tile
    return 128


def check_shapes(
    op: str, x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, pairs_per_row: int
) -> None:
    """Raise ValueError unless weight and plan match the activations."""
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or x.dtype != weight.dtype:
        raise ValueError(
            f"{op}: x {x.dtype}{tuple(x.shape)} and weight {weight.dtype}{tuple(weight.shape)} don't match: expected "
            "x [rows, K] and weight [E, N, K] of the same dtype"
        )
    if pairs_per_row < 1 or order.shape[0] != x.shape[0] * pairs_per_row or tiles.dim() != 2 or tiles.shape[1] != 3:
        raise ValueError(
            f"{op}: order {tuple(order.shape)} and tiles {tuple(tiles.shape)} don't match x {tuple(x.shape)} with "
            f"pairs_per_row={pairs_per_row}: expected order [rows * pairs_per_row] and tiles [NT, 3]"
        )


def check_8bit(op: str, scale: torch.Tensor, q: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    """Raise ValueError unless q and weight have eight bits and a scale for each of their rows."""
    if q.dtype not in DTYPES:
        raise ValueError(f"{op}: q is {q.dtype}; it must be torch.float8_e4m3fn or torch.int8 (see quantize_rowwise)")
    if scale.shape != q.shape[:1] or weight_scale.shape != weight.shape[:2]:
        raise ValueError(
            f"{op}: scale {tuple(scale.shape)} and weight_scale {tuple(weight_scale.shape)} must have one value for "
            f"each row of q {tuple(q.shape)} and of weight {tuple(weight.shape)}"
        )
    if q.dtype == torch.int8 and weight.shape[2] > MAX_INT8_K:
        raise ValueError(
            f"{op}: K is {weight.shape[2]}; int8 sums of more than {MAX_INT8_K} products may not fit int32 (use "
            "torch.float8_e4m3fn)"
        )


def run_grouped(
    op: str,
    x: torch.Tensor,
    scale: Optional[torch.Tensor],
    weight: torch.Tensor,
    weight_scale: Optional[torch.Tensor],
    delta: Optional[torch.Tensor],
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    pairs_per_row: int,
    out: torch.Tensor,
    activate: bool,
    sm_budget: int | None,
    pdl: bool,
) -> None:
    """Check what only the kernel needs and run it, for every op of this kind. Raises ValueError."""
    n, k = weight.shape[1:]
    require_contiguous(op, x=x, scale=scale, weight=weight, weight_scale=weight_scale, delta=delta, order=order)
    if tile not in TILES:
        raise ValueError(f"{op}: tile is {tile}; it must be one of {TILES} (see expert_tile)")
    if x.dtype.itemsize == 1 and k % 16:
        raise ValueError(f"{op}: K is {k}; it must be a multiple of 16 (pad the activations and the weight with zeros)")
    if out.numel() == 0:
        return
    config = grouped_config(order.shape[0], tile, n, k, x.dtype, activate)
    launch_grouped(
        x, scale, weight, weight_scale, delta, order, tiles, pairs_per_row, out, config, activate=activate,
        sm_budget=sm_budget, pdl=pdl,
    )  # fmt: skip


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, tile: int, pairs_per_row: int
) -> torch.Tensor:
    """Return y [P, N] in x's dtype: row p is weight[group of pair p] @ x[p // pairs_per_row], rounded once.

    x              [P / pairs_per_row, K]
    weight         [E, N, K] in x's dtype
    order          [P] int32: pairs sorted by group (`group_plan`)
    tiles          [NT, 3] int32: (group, first index in order, count <= tile); rows of group -1 of y are unspecified
                   (0 here, not written on a GPU)
    tile           16, 32, 64 or 128
    """
    y = grouped_linear_fake(x, weight, order, tiles, tile, pairs_per_row).zero_()
    for group, pairs in pairs_of_groups(order, tiles):
        y[pairs] = product(x[pairs // pairs_per_row], weight[group], x.dtype)
    return y


def grouped_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, tiles: torch.Tensor, tile: int, pairs_per_row: int
) -> torch.Tensor:
    """Return an empty result."""
    check_shapes("grouped_linear", x, weight, order, tiles, pairs_per_row)
    return x.new_empty((order.shape[0], weight.shape[1]))


def grouped_linear_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    pairs_per_row: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (y,), except rows of group -1. `sm_budget` limits the kernel to that many SMs."""
    run_grouped(
        "grouped_linear", x, None, weight, None, None, order, tiles, tile, pairs_per_row, out[0], False, sm_budget, pdl
    )


grouped_linear = register(
    "grouped_linear",
    grouped_linear_reference,
    grouped_linear_fake,
    grouped_linear_launch,
    kind="linear",
    family="moe",
    gathers="weight",
)


def grouped_linear_8bit_reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    pairs_per_row: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return y [P, N] of `out_dtype`: row p is weight[g] @ q[r] * scale[r] * weight_scale[g] (+ delta[p]).

    g is the group of pair p and r = p // pairs_per_row. q [P / pairs_per_row, K] and weight [E, N, K] are both e4m3 or
    both int8, scale [P / pairs_per_row] and weight_scale [E, N] fp32, delta [P, N]. Otherwise as `grouped_linear`.
    """
    y = grouped_linear_8bit_fake(
        q, scale, weight, weight_scale, delta, order, tiles, tile, pairs_per_row, out_dtype
    ).zero_()
    for group, pairs in pairs_of_groups(order, tiles):
        rows = pairs // pairs_per_row
        value = product(q[rows], weight[group], torch.float32) * scale[rows].unsqueeze(1) * weight_scale[group]
        y[pairs] = (value if delta is None else value + delta[pairs].float()).to(out_dtype)
    return y


def grouped_linear_8bit_fake(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    pairs_per_row: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return an empty result."""
    check_shapes("grouped_linear_8bit", q, weight, order, tiles, pairs_per_row)
    check_8bit("grouped_linear_8bit", scale, q, weight, weight_scale)
    return q.new_empty((order.shape[0], weight.shape[1]), dtype=out_dtype)


def grouped_linear_8bit_launch(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
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
    """Fill `out` = (y,), except rows of group -1; K must be a multiple of 16. `sm_budget` limits the kernel's SMs."""
    run_grouped(
        "grouped_linear_8bit", q, scale, weight, weight_scale, delta, order, tiles, tile, pairs_per_row, out[0], False,
        sm_budget, pdl,
    )  # fmt: skip


grouped_linear_8bit = register(
    "grouped_linear_8bit",
    grouped_linear_8bit_reference,
    grouped_linear_8bit_fake,
    grouped_linear_8bit_launch,
    kind="linear",
    family="moe",
    gathers="weight",
)
