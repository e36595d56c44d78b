"""`hadamard`: the normalised Walsh-Hadamard transform of each row, in Sylvester order; it is its own inverse.

Applied to q and k after RoPE it leaves every q.k unchanged and spreads a channel's outliers over the head, which makes
an int8 KV cache more precise.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import butterflies, cdiv, pdl_options, pdl_start, require_contiguous, round_to

PART, GPU_PART = 1 << 18, 1 << 24
"""Values that the reference transforms at a time: they stay in a processor's cache, which is faster. A GPU needs more
to be busy.
"""


def check_width(width: int) -> None:
    """Raise ValueError unless rows of this width have a Walsh-Hadamard transform."""
    if width < 2 or width & (width - 1):
        raise ValueError(f"hadamard: the last dimension must be a power of two, not {width}")


def reference(x: torch.Tensor) -> torch.Tensor:
    """Return H x / sqrt(D) of x [..., D], D a power of two, in fp32, rounded once to x's dtype."""
    width = x.shape[-1]
    check_width(width)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = max(1, (PART if x.device.type == "cpu" else GPU_PART) // width)
    for part, target in zip(x.reshape(-1, width).split(rows), out.view(-1, width).split(rows), strict=True):
        target.copy_(planes(part).T)
    return out


def planes(x: torch.Tensor) -> torch.Tensor:
    """Return H x / sqrt(D) of x [..., D] as fp32 [D, ...]. Whole planes are added several times faster than
    neighbouring columns.
    """
    width = x.shape[-1]
    check_width(width)
    values = x.movedim(-1, 0).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    results = torch.empty_like(values)
    step = 1
    while step < width:
        pairs, sums = (each.view(width // (2 * step), 2, step, -1) for each in (values, results))
        torch.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        values, results = results, values
        step *= 2
    return values.mul_(width**-0.5)


def fake(x: torch.Tensor) -> torch.Tensor:
    """Return an empty result."""
    return x.new_empty(x.shape)


@triton.jit
def fht(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the unnormalised transform of each row of x [ROWS, WIDTH], fp32."""
    return tl.reshape(butterflies(tl.reshape(x, (ROWS * WIDTH,)), ROWS * WIDTH, WIDTH), (ROWS, WIDTH))


@triton.jit
def fht_halves(first, second, ROWS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """Return the normalised transform of rows [first | second], each half [ROWS, HALF]."""
    return fht((first + second) * NORM, ROWS, HALF), fht((first - second) * NORM, ROWS, HALF)


@triton.jit
def _hadamard_kernel(x, out, rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None]
    pdl_start(PDL)
    values = fht(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), ROWS, WIDTH) * NORM
    tl.store(out + at, round_to(values, out.dtype.element_ty), mask=inside)


def launch(
    x: torch.Tensor, *, out: tuple[torch.Tensor, ...], sm_budget: Optional[int] = None, pdl: bool = False
) -> None:
    """Fill `out` = (transformed,). Ignores `sm_budget`: the launch is small."""
    require_contiguous("hadamard", x=x)
    width = x.shape[-1]
    check_width(width)
    if x.numel() == 0:
        return
    count = x.numel() // width
    rows = max(512 // width, 1)
    _hadamard_kernel[(cdiv(count, rows),)](
        x, out[0], count, ROWS=rows, WIDTH=width, NORM=width**-0.5, num_warps=1, **pdl_options(pdl)
    )


hadamard = register("hadamard", reference, fake, launch)
