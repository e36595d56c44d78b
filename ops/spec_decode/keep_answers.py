"""`keep_answers`: the tokens of answers that ended go into the ring of the adapter that gave them.

A ring holds the last tokens of many answers, one after the other. Before each stands `SEPARATOR`, which is no token, so
that nothing agrees across the border of two. Who ends when is the host's to know, and so is the place in the ring; the
tokens are copied on the device, where they are.
"""

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, pdl_options, pdl_start, require_contiguous

SEPARATOR = -1
BLOCK = 1024


def reference(history: torch.Tensor, kept: torch.Tensor, rings: torch.Tensor) -> None:
    """Copy N stretches of tokens.

    history  [R, H] int32: tokens of each sequence
    kept     [N, 5] int32: (row of the history, its first token that is kept, the one after its last, ring, place in
             the ring). With the separator a stretch has at most W tokens, and no two of a call share a place.
    writes rings [G, W] int32: at the place the separator, then the tokens; after the ring's end it goes on at 0
    """
    width = rings.shape[1]
    for row, first, end, ring, place in kept.tolist():
        places = (place + torch.arange(1 + end - first, device=rings.device)) % width
        rings[ring, places[:1]] = SEPARATOR
        rings[ring, places[1:]] = history[row, first:end]


def fake(history: torch.Tensor, kept: torch.Tensor, rings: torch.Tensor) -> None:
    """Nothing is returned."""


@triton.jit(do_not_specialize=["width", "ring_width"])
def _keep_kernel(
    history, kept, rings, width, ring_width, SEPARATOR: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program copies BLOCK tokens of one stretch."""
    pdl_start(PDL)
    entry = kept + tl.program_id(0) * 5
    row, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    ring, start = tl.load(entry + 3), tl.load(entry + 4)
    step = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = step <= end - first
    source = history + row.to(tl.int64) * width + first + step - 1
    token = tl.load(source, mask=inside & (step > 0), other=SEPARATOR)
    place = start + step
    place = tl.where(place >= ring_width, place - ring_width, place)
    tl.store(rings + ring.to(tl.int64) * ring_width + place, token, mask=inside)


def launch(
    history: torch.Tensor,
    kept: torch.Tensor,
    rings: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...] = (),
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """A program for each stretch and BLOCK places of a ring; most have nothing to copy. Too short to heed
    `sm_budget`.
    """
    require_contiguous("keep_answers", history=history, kept=kept, rings=rings)
    if len(kept) == 0:
        return
    width = rings.shape[1]
    _keep_kernel[(len(kept), cdiv(width, BLOCK))](
        history, kept, rings, history.shape[1], width, SEPARATOR=SEPARATOR, BLOCK=BLOCK, num_warps=4,
        **pdl_options(pdl),
    )  # fmt: skip


keep_answers = register("keep_answers", reference, fake, launch, mutates=("rings",))
