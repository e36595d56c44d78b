"""`lora_adjust`: the gain (DoRA) and the shift (trained biases) of each token's adapter on a linear's result."""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, in_fp32, pdl_options, pdl_start, require_contiguous, rotate_columns, round_to
from ..elementwise.hadamard import check_width
from ..elementwise.hadamard import reference as hadamard

COLUMNS = 1024  # of a program; a multiple of every rotated block


def reference(
    y: torch.Tensor,
    gain: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    adapter_index: torch.Tensor,
    rotate: int = 0,
    first: int = 0,
    end: int = 0,
) -> torch.Tensor:
    """Return y + y * gain[slot] + shift[slot] with slot = adapter_index[t], in fp32, rounded once to y's dtype.

    y              [T, N] model dtype
    gain           [S, N] fp32: the gain less one, so that zeros change nothing; None: no gain
    shift          [S, N] fp32, or None
    adapter_index  [T] int32, -1 = no adapter: y unchanged
    rotate         width of the blocks of columns `first` to `end` that y holds rotated (`rotate_values`); 0: none. The
                   gain applies to the columns before the rotation; the shift is rotated already
    """
    values = y.float()
    change = torch.zeros_like(values)
    slot, active = adapter_index.clamp(min=0), (adapter_index >= 0).unsqueeze(-1)
    if gain is not None:
        change = gain[slot] * values
        if rotate:
            check_width(rotate)
            plain = hadamard(values[:, first:end].unflatten(-1, (-1, rotate))).flatten(-2)
            scaled = gain[slot, first:end] * plain
            change[:, first:end] = hadamard(scaled.unflatten(-1, (-1, rotate))).flatten(-2)
    if shift is not None:
        change = change + shift[slot]
    return torch.where(active & (change != 0), values + change, values).to(y.dtype)


def fake(y: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result."""
    return y.new_empty(y.shape)


@triton.jit
def _adjust_kernel(
    y, gain, shift, adapter_index, out, n, first, end, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    column = begin + tl.arange(0, COLUMNS)
    inside = column < n
    pdl_start(PDL)
    slot = tl.load(adapter_index + token)
    values = in_fp32(tl.load(y + token * n + column, mask=inside, other=0.0))
    at = slot.to(tl.int64) * n + column
    active = column < tl.where(slot >= 0, n, 0)
    change = tl.zeros([COLUMNS], tl.float32)
    if gain is not None:
        factor = tl.load(gain + at, mask=active, other=0.0)
        change = factor * values
        if WIDTH > 1:  # noqa: SIM102  (known at compile time)
            if (begin < end) & (begin + COLUMNS > first):
                rotated = rotate_columns(factor * rotate_columns(values, COLUMNS, WIDTH), COLUMNS, WIDTH)
                change = tl.where((column >= first) & (column < end), rotated, change)
    if shift is not None:
        change += tl.load(shift + at, mask=active, other=0.0)
    result = tl.where(change == 0.0, values, values + change)
    tl.store(out + token * n + column, round_to(result, out.dtype.element_ty), mask=inside)


def launch(
    y: torch.Tensor,
    gain: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    adapter_index: torch.Tensor,
    rotate: int = 0,
    first: int = 0,
    end: int = 0,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (adjusted,). Ignores `sm_budget`: the launch is small. Raises ValueError for other shapes."""
    require_contiguous("lora_adjust", y=y, gain=gain, shift=shift, out=out[0])
    tokens, n = y.shape
    for stack in (gain, shift):
        if stack is not None and (stack.dtype != torch.float32 or stack.dim() != 2 or stack.shape[1] != n):
            raise ValueError(f"lora_adjust: a stack is {stack.dtype}{tuple(stack.shape)}, expected fp32 [S, {n}]")
    if rotate:
        check_width(rotate)
        if first % rotate or end % rotate or COLUMNS % rotate or not 0 <= first <= end <= n:
            raise ValueError(f"lora_adjust: columns {first} to {end} are not blocks of {rotate} of {n} columns")
    if y.numel() == 0:
        return
    _adjust_kernel[tokens, cdiv(n, COLUMNS)](
        y, gain, shift, adapter_index, out[0], n, first, end, COLUMNS=COLUMNS, WIDTH=max(rotate, 1),
        **pdl_options(pdl),
    )  # fmt: skip


lora_adjust = register("lora_adjust", reference, fake, launch, family="lora")
