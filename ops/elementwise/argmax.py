"""`argmax`: the greedy token of each row, in one launch.

A row is divided into pieces, so that also few rows fill the GPU; the last program of a row reduces the pieces. The
lowest id among the largest logits does not depend on the order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors, workspace
from ..core.registry import register
from ..core.triton_support import cdiv, pdl_options, pdl_start, require_contiguous
from .token_masks import allow, check_masks, masked_logits

BLOCK = 4096
MAX_PIECES = 64
PROGRAMS_PER_SM = 4


def reference(
    logits: torch.Tensor, masks: torch.Tensor | None = None, mask_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the lowest id among the largest logits of each row, [B] int32, of logits [B, V] of any float dtype.

    It is -1 for a row that has NaN or an infinite largest logit. masks [M, W], mask_rows [B] int32: allowed tokens (see
    `token_masks`).
    """
    logits = masked_logits(logits, masks, mask_rows)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    largest = logits.amax(-1, keepdim=True)  # NaN for a row with NaN
    chosen = ids.where(logits == largest, logits.shape[1]).amin(-1)
    return chosen.where(largest[:, 0].isfinite(), -1).to(torch.int32)


def fake(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result."""
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)


@triton.jit(do_not_specialize=["span", "pieces"])  # they depend on the number of rows
def _argmax_kernel(
    logits, masks, mask_rows, tokens, values, ids, arrivals, vocabulary, span, pieces, MAX_PIECES: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Reduce a piece: program (piece, row) reads ids from piece * span on. A row's last program reduces its pieces."""
    piece, row = tl.program_id(0), tl.program_id(1)
    pdl_start(PDL)
    source = logits + row.to(tl.int64) * vocabulary
    if MASKED:
        mask_row = tl.load(mask_rows + row)
        mask = masks + tl.maximum(mask_row, 0).to(tl.int64) * ((vocabulary + 31) // 32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = piece * span + tl.arange(0, BLOCK)
    broken = tl.zeros([BLOCK], tl.int1)
    for start in range(0, span, BLOCK):
        token = piece * span + start + tl.arange(0, BLOCK)
        inside = (start + tl.arange(0, BLOCK) < span) & (token < vocabulary)
        logit = tl.load(source + token, mask=inside, other=float("-inf")).to(tl.float32)
        broken |= logit != logit
        if MASKED:
            logit = allow(logit, token, inside, mask, mask_row)
        index = tl.where(logit > best, token, index)
        best = tl.where(logit > best, logit, best)
    largest = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == largest, index, 0x7FFFFFFF), axis=0)
    largest = tl.where(tl.max(broken.to(tl.int32), axis=0) > 0, float("inf"), largest)  # treat NaN as infinite
    if pieces == 1:
        tl.store(tokens + row, tl.where(tl.abs(largest) < float("inf"), chosen, -1))
    else:
        tl.store(values + row * MAX_PIECES + piece, largest)
        tl.store(ids + row * MAX_PIECES + piece, chosen)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == pieces - 1:
            place = tl.arange(0, MAX_PIECES)
            value = tl.load(
                values + row * MAX_PIECES + place, mask=place < pieces, other=float("-inf"), cache_modifier=".cg"
            )
            token = tl.load(ids + row * MAX_PIECES + place, mask=place < pieces, other=0x7FFFFFFF, cache_modifier=".cg")
            largest = tl.max(value, axis=0)
            chosen = tl.min(tl.where(value == largest, token, 0x7FFFFFFF), axis=0)
            tl.store(tokens + row, tl.where(tl.abs(largest) < float("inf"), chosen, -1))
            tl.store(arrivals + row, 0)


def launch(
    logits: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (tokens,), with enough pieces per row to fill the GPU. Ignores `sm_budget`: the launch is small."""
    require_contiguous("argmax", logits=logits)
    check_masks("argmax", logits, masks, mask_rows)
    rows, vocabulary = logits.shape
    if rows == 0:
        return
    wanted = max(1, min(MAX_PIECES, PROGRAMS_PER_SM * multiprocessors(logits.device) // rows))
    span = cdiv(cdiv(vocabulary, wanted), BLOCK) * BLOCK
    pieces = cdiv(vocabulary, span)
    device = logits.device
    values = workspace(device, "argmax_values", rows * MAX_PIECES * 4).view(torch.float32)
    ids = workspace(device, "argmax_ids", rows * MAX_PIECES * 4).view(torch.int32)
    arrivals = workspace(device, "argmax_arrivals", rows * 4, zero=True).view(torch.int32)
    _argmax_kernel[(pieces, rows)](
        logits, logits if masks is None else masks, logits if mask_rows is None else mask_rows, out[0], values, ids,
        arrivals, vocabulary, span, pieces, MAX_PIECES=MAX_PIECES, BLOCK=BLOCK, MASKED=masks is not None, num_warps=8,
        **pdl_options(pdl),
    )  # fmt: skip


argmax = register("argmax", reference, fake, launch)
