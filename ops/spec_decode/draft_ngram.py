"""`draft_ngram`: drafts from a sequence's own tokens: those that followed an earlier occurrence of its last tokens.

Of all earlier positions that match the sequence's end, the longest match is used (up to `LONGEST` tokens), of several
the latest. The tokens after it are the draft. At the end of the sequence the draft continues after the match again, so
a run of one token or a short cycle is repeated. A sequence without a match drafts its last token. The same history
always gives the same drafts. The match length is returned too, because another source may match more tokens
(`draft_recalled`).
"""

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import next_power_of_2, pdl_options, pdl_start, require_contiguous

LONGEST = 8
WINDOW = 8192
"""Number of latest positions that are searched: a longer search would take more time than it saves."""
BLOCK = 1024


def reference(
    history: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft `count` tokens for each sequence.

    history  [R, H] int32: tokens of each row
    lengths  [R] int32: number of tokens, at least 1
    rows     [B] int32: the row of each sequence; -1: none, with drafts 0
    returns  drafts [B, count] int32, and the number of matching tokens [B] int32
    """
    longest = torch.zeros_like(rows)
    drafts = torch.zeros(len(rows), count, dtype=torch.int32, device=history.device)
    steps = torch.arange(count, device=history.device)
    for index, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        length = int(lengths[row])
        tokens = history[row, :length]
        places = torch.arange(max(0, length - 1 - WINDOW), length - 1, device=history.device)
        agreed, agrees = torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool)
        for back in range(min(LONGEST, length)):
            agrees &= (places >= back) & (tokens[(places - back).clamp_min(0)] == tokens[length - 1 - back])
            agreed += agrees
        place = length - 2 if length < 2 else int(places[(agreed * length + places).argmax()])
        longest[index] = agreed.max() if len(agreed) else 0
        drafts[index] = tokens[place + 1 + steps % (length - 1 - place)]
    return drafts, longest


def fake(
    history: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return history.new_empty(rows.shape[0], count), torch.empty_like(rows)


@triton.jit(do_not_specialize=["width", "count"])
def _draft_kernel(
    history, lengths, rows, drafts, longest, width, count, LONGEST: tl.constexpr, WINDOW: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Search all positions of one sequence per program."""
    pdl_start(PDL)
    index = tl.program_id(0)
    row = tl.load(rows + index)
    step = tl.arange(0, COUNT)
    out = drafts + index * count + step
    if row < 0:
        tl.store(out, tl.zeros([COUNT], tl.int32), mask=step < count)
        tl.store(longest + index, 0)
        return
    tokens = history + row.to(tl.int64) * width
    length = tl.load(lengths + row)
    first = tl.maximum(length - 1 - WINDOW, 0)
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(first, length - 1, BLOCK):
        place = start + tl.arange(0, BLOCK)
        agrees = place < length - 1
        agreed = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(LONGEST):
            wanted = tl.load(tokens + tl.maximum(length - 1 - back, 0))
            agrees = agrees & (place >= back)
            agrees = agrees & (tl.load(tokens + place - back, mask=agrees, other=-1) == wanted)
            agreed += agrees.to(tl.int32)
        key = tl.where(place < length - 1, agreed.to(tl.int64) * width + place, -1)
        best = tl.maximum(best, key)
    found = tl.max(best, axis=0)
    place = tl.where(found < 0, length - 2, (found % width).to(tl.int32))
    tl.store(longest + index, tl.where(found < 0, 0, (found // width).to(tl.int32)))
    source = place + 1 + step % (length - 1 - place)
    tl.store(out, tl.load(tokens + source, mask=step < count, other=0), mask=step < count)


def launch(
    history: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    count: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (drafts, match lengths) by one program per sequence. Ignores `sm_budget`: the launch is small."""
    require_contiguous("draft_ngram", history=history, lengths=lengths, rows=rows)
    if len(rows) == 0 or count == 0:
        out[1].zero_()
        return
    _draft_kernel[(len(rows),)](
        history, lengths, rows, out[0], out[1], history.shape[1], count, LONGEST=LONGEST, WINDOW=WINDOW,
        COUNT=next_power_of_2(count), BLOCK=BLOCK, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


draft_ngram = register("draft_ngram", reference, fake, launch)
