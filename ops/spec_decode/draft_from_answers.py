"""`draft_recalled`: drafts from earlier answers of the same adapter, if they match more tokens than the sequence.

A ring buffer (see `keep_answers`) is searched like a sequence in `draft_ngram`: the longest match is used, of several
the latest. A match without a following token does not count. The same ring and history always give the same drafts, so
all tensor-parallel ranks have the same drafts.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import next_power_of_2, pdl_options, pdl_start, require_contiguous
from .draft_ngram import LONGEST

BLOCK = 4096


def reference(
    history: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    agreed: torch.Tensor,
    rings: torch.Tensor,
    which: torch.Tensor,
    ends: torch.Tensor,
    filled: torch.Tensor,
    drafts: torch.Tensor,
) -> torch.Tensor:
    """Replace the drafts of sequences with a longer match in their ring.

    history  [R, H] int32, lengths [R] int32: the rows' tokens
    rows     [B] int32: the row of each sequence, -1: none
    agreed   [B] int32: number of matching tokens of the current drafts
    rings    [G, W] int32: earlier answers
    which    [B] int32: the ring of each sequence, -1: none
    ends     [B] int32: the position after the ring's newest token, in [0, W)
    filled   [B] int32: number of valid tokens before it
    writes drafts [B, K] int32: tokens after the match; 0 after the ring's end
    returns  [B] int32: 1 if the drafts were replaced, else 0
    """
    width, count = rings.shape[1], drafts.shape[1]
    recalled = torch.zeros_like(rows)
    for index, (row, ring) in enumerate(zip(rows.tolist(), which.tolist(), strict=True)):
        known = int(filled[index])
        if row < 0 or ring < 0 or known < 2:
            continue
        order = (int(ends[index]) - known + torch.arange(known, device=rings.device)) % width
        tokens, length = rings[ring, order], int(lengths[row])
        places = torch.arange(known - 1, device=rings.device)
        goes_on = tokens[1:] >= 0
        agrees, found = goes_on.clone(), torch.zeros_like(places)
        for back in range(min(LONGEST, length)):
            agrees &= (places >= back) & (tokens[(places - back).clamp_min(0)] == history[row, length - 1 - back])
            found += agrees
        best = int(torch.where(goes_on, found * width + places, -1).max())
        if best // width <= int(agreed[index]):
            continue
        recalled[index] = 1
        after = best % width + 1
        drafts[index] = 0
        drafts[index, : known - after] = tokens[after : after + count].clamp_min(0)
    return recalled


def fake(history: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result."""
    return torch.empty_like(rows)


@triton.jit(do_not_specialize=["width", "ring_width", "count"])
def _recall_kernel(
    history, lengths, rows, agreed, rings, which, ends, filled, drafts, recalled, width, ring_width, count,
    LONGEST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Search all positions of one sequence's ring per program."""
    pdl_start(PDL)
    index = tl.program_id(0)
    row, ring, own = tl.load(rows + index), tl.load(which + index), tl.load(agreed + index)
    if (row < 0) | (ring < 0) | (own >= LONGEST):
        tl.store(recalled + index, 0)
        return
    known = tl.load(filled + index)
    oldest = tl.load(ends + index) - known
    oldest = tl.where(oldest < 0, oldest + ring_width, oldest)
    tokens = rings + ring.to(tl.int64) * ring_width
    length = tl.load(lengths + row)
    end = history + row.to(tl.int64) * width + length - 1
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, known - 1, BLOCK):
        place = start + tl.arange(0, BLOCK)
        at = oldest + place
        at = tl.where(at >= ring_width, at - ring_width, at)
        after = tl.where(at + 1 >= ring_width, 0, at + 1)
        goes_on = tl.load(tokens + after, mask=place < known - 1, other=-1) >= 0
        agrees = goes_on
        found = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(LONGEST):
            wanted = tl.where(length > back, tl.load(end - tl.minimum(back, length - 1)), -2)  # no token is -2
            source = tl.where(at < back, at - back + ring_width, at - back)
            agrees = agrees & (place >= back)
            agrees = agrees & (tl.load(tokens + source, mask=agrees, other=-1) == wanted)
            found += agrees.to(tl.int32)
        best = tl.maximum(best, tl.where(goes_on, found.to(tl.int64) * ring_width + place, -1))
    top = tl.max(best, axis=0)
    knows_better = top >= (own + 1).to(tl.int64) * ring_width
    tl.store(recalled + index, knows_better.to(tl.int32))
    if knows_better:
        step = tl.arange(0, COUNT)
        after = (top % ring_width).to(tl.int32) + 1 + step
        at = oldest + after
        at = tl.where(at >= ring_width, at - ring_width, at)
        token = tl.load(tokens + at, mask=(after < known) & (step < count), other=0)
        tl.store(drafts + index * count + step, tl.maximum(token, 0), mask=step < count)


def launch(
    history: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    agreed: torch.Tensor,
    rings: torch.Tensor,
    which: torch.Tensor,
    ends: torch.Tensor,
    filled: torch.Tensor,
    drafts: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Write drafts and fill `out` = (replaced,) by one program per sequence. Ignores `sm_budget`: a small launch."""
    require_contiguous("draft_recalled", history=history, rings=rings, drafts=drafts)
    count = drafts.shape[1]
    if len(rows) == 0 or count == 0:
        out[0].zero_()
        return
    _recall_kernel[(len(rows),)](
        history, lengths, rows, agreed, rings, which, ends, filled, drafts, out[0], history.shape[1], rings.shape[1],
        count, LONGEST=LONGEST, COUNT=next_power_of_2(count), BLOCK=BLOCK, num_warps=16, **pdl_options(pdl),
    )  # fmt: skip


draft_recalled = register("draft_recalled", reference, fake, launch, mutates=("drafts",))
