"""What is left of a token after LoRA's first half, in int8: `lora_shrink`'s planes added up and rounded once for all
who multiply them.

The ops that make a delta themselves have many programs for each token. Rounded here, beside the projection that they
follow, a token's ranks are a sixteenth of the planes' bytes for each of them, and nothing of the sum or of the search
for its largest value is behind their wait.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, next_power_of_2, pdl_options, require_contiguous, row_scale, to_int8
from ..rows.quantize import quantize_rowwise_reference
from .shrink import wait_then_launch

ROWS = 16  # of a program
WARPS = 4


def lora_round_reference(planes: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """planes [splits, T, parts * R] fp32, added in order -> (q [T, parts * R] int8, step [T, parts] fp32):
    `quantize_rowwise` of each part's R ranks.

    The kernel multiplies by 1 / step, so a value that lies on a rounding edge may land one step from the reference's.
    """
    check(planes, parts)
    total = planes[0]
    for plane in planes[1:]:
        total = total + plane
    q, step = quantize_rowwise_reference(total.unflatten(1, (parts, -1)), torch.int8)
    return q.flatten(1), step


def lora_round_fake(planes: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    check(planes, parts)
    return planes.new_empty(planes.shape[1:], dtype=torch.int8), planes.new_empty((planes.shape[1], parts))


def check(planes: torch.Tensor, parts: int) -> None:
    """Raises ValueError for planes that are not fp32 of `parts` times as many ranks."""
    if planes.dim() != 3 or planes.dtype != torch.float32 or parts < 1 or planes.shape[2] % parts:
        raise ValueError(
            f"lora_round: planes {planes.dtype}{tuple(planes.shape)} for {parts} linears; needs torch.float32 "
            "[splits, T, n * R] for n linears"
        )


@triton.jit
def lora_round_kernel(
    planes,
    q,
    step,
    rows,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for ROWS rows, a row being one token's ranks of one linear."""
    wait_then_launch(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, RANKS)
    at = row[:, None] * RANK + rank[None, :]
    wanted = (row < rows)[:, None] & (rank < RANK)[None, :]
    total = tl.zeros([ROWS, RANKS], tl.float32)
    for plane in tl.static_range(SPLITS):
        total += tl.load(planes + plane * rows * RANK + at, mask=wanted, other=0.0)
    size = row_scale(tl.max(tl.abs(total), axis=1), tl.int8)
    tl.store(q + at, to_int8(total * (1.0 / size)[:, None]), mask=wanted)
    tl.store(step + row, size, mask=row < rows)


def lora_round_launch(
    planes: torch.Tensor,
    parts: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (q, step). Too small to heed `sm_budget`."""
    check(planes, parts)
    require_contiguous("lora_round", planes=planes)
    if planes.numel() == 0:
        return
    rows, rank = planes.shape[1] * parts, planes.shape[2] // parts
    lora_round_kernel[(cdiv(rows, ROWS),)](
        planes,
        *out,
        rows,
        SPLITS=planes.shape[0],
        RANK=rank,
        RANKS=next_power_of_2(rank),
        ROWS=ROWS,
        num_warps=WARPS,
        **pdl_options(pdl),
    )


lora_round = register(
    "lora_round", lora_round_reference, lora_round_fake, lora_round_launch, kind="lora", family="lora"
)
