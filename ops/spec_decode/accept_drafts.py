"""`accept_drafts`: accept the drafts that the model samples itself, and append them to the history.

A draft is computed like the next token. It is accepted if the row before it sampled the same token. Noise depends only
on (seed, step, token), so a row samples the same token as a step without drafts would. The sequence therefore equals
one without drafts, greedy or not, up to the first rejected draft and the token sampled instead of it. Tokens of later
rows are discarded.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import next_power_of_2, pdl_options, pdl_start, require_contiguous


def reference(
    tokens: torch.Tensor,
    drafts: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    first: torch.Tensor,
    history: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Count accepted drafts, and append them and the next sampled token to the history.

    tokens   [N] int32: sampled tokens; -1 (no token) ends a sequence's tokens and is stored as 0
    drafts   [B, K] int32 (K may be 0)
    rows     [B] int32: each sequence's row of the history, -1: none
    counts   [B] int32: number of computed drafts; -1 counts as 0
    first    [B] int32: index in `tokens` of a sequence's first sampled token; its others are next to it
    writes history [R, H] and lengths [R] int32, up to the end of the row
    returns  [B] int32: accepted drafts
    """
    accepted = torch.zeros_like(rows)
    width = history.shape[1]
    for index, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
        if row < 0:
            continue
        begin, count, length = int(first[index]), max(count, 0), int(lengths[row])
        sampled = tokens[begin : begin + 1 + count]
        held = int((sampled[:count] == drafts[index, :count]).to(torch.int32).cumprod(0).sum())
        accepted[index] = held
        room = max(0, min(1 + held, width - length))
        history[row, length : length + room] = sampled[:room].clamp_min(0)
        lengths[row] = length + 1 + held
    return accepted


def fake(tokens: torch.Tensor, drafts: torch.Tensor, rows: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result."""
    return torch.empty_like(rows)


@triton.jit(do_not_specialize=["width", "most"])
def _accept_kernel(
    tokens, drafts, rows, counts, first, history, lengths, accepted, width, most, COUNT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Process one sequence per program; COUNT >= 1 + K."""
    pdl_start(PDL)
    index = tl.program_id(0)
    row = tl.load(rows + index)
    if row < 0:
        tl.store(accepted + index, 0)
        return
    count = tl.maximum(tl.load(counts + index), 0)
    step = tl.arange(0, COUNT)
    sampled = tl.load(tokens + tl.load(first + index) + step, mask=step <= count, other=-1)
    draft = tl.load(drafts + index * most + step, mask=step < count, other=0)
    # index of the first rejected draft, or the number of drafts
    held = tl.min(tl.where((step < count) & (sampled == draft), COUNT, step), axis=0)
    length = tl.load(lengths + row)
    place = length + step
    kept = (step <= held) & (place < width)
    tl.store(history + row.to(tl.int64) * width + place, tl.maximum(sampled, 0), mask=kept)
    tl.store(lengths + row, length + 1 + held)
    tl.store(accepted + index, held)


def launch(
    tokens: torch.Tensor,
    drafts: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    first: torch.Tensor,
    history: torch.Tensor,
    lengths: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (accepted,) by one program per sequence. Ignores `sm_budget`: the launch is small."""
    require_contiguous("accept_drafts", tokens=tokens, drafts=drafts, history=history)
    if len(rows) == 0:
        return
    most = drafts.shape[1]
    _accept_kernel[(len(rows),)](
        tokens, drafts, rows, counts, first, history, lengths, out[0], history.shape[1], most,
        COUNT=next_power_of_2(1 + most), num_warps=1, **pdl_options(pdl),
    )  # fmt: skip


accept_drafts = register("accept_drafts", reference, fake, launch, mutates=("history", "lengths"))
