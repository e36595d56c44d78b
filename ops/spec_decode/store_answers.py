"""`keep_answers`: copy tokens of finished answers to the ring buffer of their adapter.

A ring holds the last tokens of many answers. `SEPARATOR`, which is not a token, precedes each answer, so no match
extends across two answers. The host chooses finished sequences and ring positions; the device copies the tokens.
"""

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, pdl_options, pdl_start, require_contiguous

SEPARATOR = -1
BLOCK = 1024


def reference(history: torch.Tensor, kept: torch.Tensor, rings: torch.Tensor) -> None:
    """Copy N spans of tokens.

    history  [R, H] int32: tokens of each sequence
    kept     [N, 5] int32: (row of the history, first token, end, ring, ring position). With the separator a span has at
             most W tokens, and spans of one call do not overlap in a ring.
    writes rings [G, W] int32: the separator at the position, then the tokens, wrapping around at the ring's end
    """
    width = rings.shape[1]
    for row, first, end, ring, place in kept.tolist():
        places = (place + torch.arange(1 + end - first, device=rings.device)) % width
        rings[ring, places[:1]] = SEPARATOR
        rings[ring, places[1:]] = history[row, first:end]


def fake(history: torch.Tensor, kept: torch.Tensor, rings: torch.Tensor) -> None:
    """Return nothing."""


@triton.jit(do_not_specialize=["width", "ring_width"])
def _keep_kernel(
    history, kept, rings, width, ring_width, SEPARATOR: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK tokens of one span per program."""
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
    """Copy the spans by one program per span and BLOCK ring positions; most copy nothing. Ignores `sm_budget`."""
    require_contiguous("keep_answers", history=history, kept=kept, rings=rings)
    if len(kept) == 0:
        return
    width = rings.shape[1]
    _keep_kernel[(len(kept), cdiv(width, BLOCK))](
        history, kept, rings, history.shape[1], width, SEPARATOR=SEPARATOR, BLOCK=BLOCK, num_warps=4,
        **pdl_options(pdl),
    )  # fmt: skip


keep_answers = register("keep_answers", reference, fake, launch, mutates=("rings",))
