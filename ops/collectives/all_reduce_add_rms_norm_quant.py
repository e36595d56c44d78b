"""All-reduce (with LoRA delta), residual sum, RMSNorm and rowwise quantization in one kernel.

It runs between two linears of a model that is split over GPUs. One-shot: each rank reads a row from all peers and
computes everything. Two-shot: a row's owner (row % world) reads it from all peers and publishes the sum; the others
read the sum and compute the rest. With `spread`, and if no op reads the row in 16 bits, the owner computes everything
and the others read the 8-bit row and its scale. That is half the bytes, and only the owner stores and reads the
residual row.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.dtypes import as_residual, of_residual, residual_in_fp32, round_residual
from ..core.registry import register
from ..core.triton_support import in_fp32, pdl_options, pdl_start, require_contiguous, round_to, rounded_to
from ..elementwise.quantize import E4M3, rotated_width, store_quantized_row
from ..elementwise.quantize import reference as quantize_rowwise_reference
from ..elementwise.rms_norm import add_rms_norm_quant, rms_norm_reference
from .all_reduce import add_in_rank_order
from .exchange import exchange_of, is_one_shot
from .signals import EPOCH, EVERYBODY, add_up, await_flags, flags_of, memory_of, row_of, signal, take_ticket
from .tensor_parallel_group import group_named


def with_delta(partial: torch.Tensor, delta: Optional[torch.Tensor]) -> torch.Tensor:
    """Return the part that peers read: partial + delta summed in fp32, in partial's dtype."""
    return partial if delta is None else (partial.float() + delta.float()).to(partial.dtype)


def from_all_parts(
    parts: list[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, q, scale, new_residual) of all ranks' parts, in rank order."""
    total = add_in_rank_order(parts) + residual_in_fp32(residual, weight.dtype)
    new_residual = round_residual(total, residual.dtype, weight.dtype)
    y = rms_norm_reference(new_residual, weight, eps)
    q, scale = quantize_rowwise_reference(y, dtype, rotate)
    return y if keep else y.new_empty(0, y.shape[-1]), q, scale, new_residual


def reference(
    partial: torch.Tensor,
    residual: torch.Tensor,
    delta: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    group: str,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    spread: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, q, scale, new_residual) as `add_rms_norm_quant` of the sum over all ranks of partial + delta [..., H].

    Residuals may be fp16 if the rest is bf16 (`core/dtypes.py`). Each rank's partial + delta is rounded to its dtype;
    these and the residual are added in rank order in fp32 and rounded once. All ranks get the same bits. `spread`: only
    ops of this kind read new_residual. So a rank may leave undefined the rows that it does not own (row % world), and
    it does not read these rows of `residual`.
    """
    parts = group_named(group).gather(with_delta(partial, delta))
    return from_all_parts(parts, residual, weight, eps, keep, dtype, rotate)


def fake(
    partial: torch.Tensor,
    residual: torch.Tensor,
    delta: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    group: str,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return add_rms_norm_quant.fake(partial, residual, delta, weight, eps, keep, dtype, rotate)


@triton.jit
def _finish(
    values, gain, y, q, scale, row, column, inside, eps, dtype: tl.constexpr, KEEP: tl.constexpr, ROTATE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize and quantize a row of the new residual."""
    normalised = values * tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    result = rounded_to(rounded_to(normalised, dtype) * gain.to(tl.float32), dtype)
    if KEEP:
        tl.store(y + row * WIDTH + column, result.to(dtype), mask=inside)
    store_quantized_row(result, q, scale, row, column, inside, WIDTH, BLOCK, ROTATE)


@triton.jit
def _kernel(
    partial, residual, delta, weight, y, q, scale, new_residual, memories, rows, placed, slot_bytes, eps,
    RANK: tl.constexpr, WORLD: tl.constexpr, PLACED: tl.constexpr, DONE: tl.constexpr, SLOTS: tl.constexpr,
    ONE_SHOT: tl.constexpr, EIGHT: tl.constexpr, HAS_DELTA: tl.constexpr, KEEP: tl.constexpr, ROTATE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = partial.dtype.element_ty
    model: tl.constexpr = weight.dtype.element_ty
    stream: tl.constexpr = residual.dtype.element_ty  # as wide as partial: a row of both fits a slot
    narrow: tl.constexpr = q.dtype.element_ty
    ROW_BYTES: tl.constexpr = WIDTH * (dtype.primitive_bitwidth // 8)
    memory = memories[RANK]
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0)  # a weight: no earlier kernel writes it
    pdl_start(PDL)
    epoch, row = take_ticket(memory, rows)
    at = row * WIDTH + column
    ready, done = flags_of(row, DONE, WORLD)
    slot = SLOTS + (epoch & 1) * slot_bytes + row * ROW_BYTES
    source = placed + row * ROW_BYTES if PLACED else slot
    owner = row % WORLD

    mine = tl.load(partial + at, mask=inside, other=0.0)
    if HAS_DELTA:
        mine = round_to(in_fp32(mine) + in_fp32(tl.load(delta + at, mask=inside, other=0.0)), dtype)
    if not PLACED:
        tl.store(row_of(memory, slot, dtype) + column, mine, mask=inside)
    signal(memories, ready + RANK * EPOCH, epoch, EVERYBODY if ONE_SHOT else owner, RANK, WORLD)

    if ONE_SHOT or owner == RANK:
        before = tl.load(residual + at, mask=inside, other=0.0)  # this load overlaps with the wait for peers
        await_flags(memory + ready, epoch, WORLD, RANK)
        values = add_up(mine, memories, source, column, inside, dtype, RANK, WORLD)
        held, values = as_residual(values + of_residual(before, model), stream, model)
        tl.store(new_residual + at, held, mask=inside)
        if not ONE_SHOT:
            if EIGHT:  # the other ranks read this result instead of the sum
                _finish(
                    values, gain, y, row_of(memory, slot, narrow), row_of(memory, slot + WIDTH, tl.float32), 0, column,
                    inside, eps, dtype, False, ROTATE, WIDTH, BLOCK,
                )  # fmt: skip
            else:
                tl.store(row_of(memory, slot, stream) + column, held, mask=inside)
            signal(memories, done, epoch, EVERYBODY, RANK, WORLD)
        _finish(values, gain, y, q, scale, row, column, inside, eps, dtype, KEEP, ROTATE, WIDTH, BLOCK)
    else:
        await_flags(memory + done, epoch, 1, -1)
        theirs = memory_of(memories, owner, WORLD)
        if EIGHT:
            steps = tl.load(row_of(theirs, slot, narrow) + column, mask=inside, other=0.0)
            tl.store(q + at, steps, mask=inside)
            tl.store(scale + row, tl.load(row_of(theirs, slot + WIDTH, tl.float32)))
        else:
            held = tl.load(row_of(theirs, slot, stream) + column, mask=inside, other=0.0)
            tl.store(new_residual + at, held, mask=inside)
            values = of_residual(held, model)
            _finish(values, gain, y, q, scale, row, column, inside, eps, dtype, KEEP, ROTATE, WIDTH, BLOCK)


def launch(
    partial: torch.Tensor,
    residual: torch.Tensor,
    delta: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    group: str,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    spread: bool = False,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
    one_shot: Optional[bool] = None,
) -> None:
    """Fill `out` = (y, q, scale, new_residual), by the reference if there is no shared memory.

    `one_shot` overrides the choice by size. Ignores `sm_budget`: one CTA per row.
    """
    exchange = exchange_of(group, partial.device)
    if exchange is None:
        results = reference(partial, residual, delta, weight, eps, group, keep, dtype, rotate, spread)
        for target, result in zip(out, results, strict=True):
            target.copy_(result)
        return
    name = "all_reduce_add_rms_norm_quant"
    require_contiguous(name, partial=partial, residual=residual, delta=delta, weight=weight)
    if one_shot is None:
        one_shot = is_one_shot(partial.nbytes, exchange.world)
    y, q, scale, new_residual = out
    for rows, arguments in exchange.launches(name, partial, placed=delta is None):

        def cut(tensor: Optional[torch.Tensor], rows: slice = rows) -> Optional[torch.Tensor]:
            return None if tensor is None else tensor.flatten(0, -2)[rows]

        _kernel[arguments["rows"],](
            cut(partial), cut(residual), cut(delta), weight, cut(y if keep else None), cut(q), scale.flatten()[rows],
            cut(new_residual), exchange.memories, eps=eps, **arguments, ONE_SHOT=one_shot, EIGHT=spread and not keep,
            HAS_DELTA=delta is not None, KEEP=keep, ROTATE=rotated_width(partial.shape[-1], rotate),
            **pdl_options(pdl),
        )  # fmt: skip


all_reduce_add_rms_norm_quant = register(
    "all_reduce_add_rms_norm_quant", reference, fake, launch, kind="collective_norm", family="collective"
)
