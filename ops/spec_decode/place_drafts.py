"""`place_drafts`: write the inputs of sequences with drafts; only the device has their lengths.

A sequence of n tokens computes its last token and its drafts: rows at positions n - 1, n, ... of a context that ends
with them. The block table gives their KV slots; the next step overwrites those of rejected drafts before any read.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..core.kv_layout import PAGE_SIZE
from ..core.registry import register
from ..core.triton_support import next_power_of_2, pdl_options, pdl_start, require_contiguous


def reference(
    history: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    """Write the inputs of B sequences.

    history      [R, H] int32, lengths [R] int32: the rows' tokens
    drafts       [B, K] int32 (K may be 0)
    rows         [B] int32: the row of each sequence, -1: none
    counts       [B] int32: number of drafts that a sequence computes; -1: do not write its inputs
    query_start  [>= B + 1] int32: its first row of the step
    block_table  [>= B, P] int32
    writes input_ids, positions, slot_mapping [T] and context_lens [>= B], all int32
    """
    width = history.shape[1]
    for index, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
        if row < 0 or count < 0:
            continue
        length, first = int(lengths[row]), int(query_start[index])
        mine = slice(first, first + 1 + count)
        places = torch.arange(length - 1, length + count, dtype=torch.int32, device=history.device)
        input_ids[first] = history[row, min(length, width) - 1]
        input_ids[first + 1 : first + 1 + count] = drafts[index, :count]
        positions[mine] = places
        slot_mapping[mine] = block_table[index, (places // PAGE_SIZE).long()] * PAGE_SIZE + places % PAGE_SIZE
        context_lens[index] = length + count


def fake(*_: Any) -> None:
    """Return nothing."""


@triton.jit(do_not_specialize=["width", "most", "blocks"])
def _place_kernel(
    history, lengths, drafts, rows, counts, query_start, block_table, input_ids, positions, slot_mapping, context_lens,
    width, most, blocks, COUNT: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write one sequence's rows per program; COUNT >= 1 + K."""
    pdl_start(PDL)
    index = tl.program_id(0)
    row, count = tl.load(rows + index), tl.load(counts + index)
    if (row < 0) | (count < 0):
        return
    length, first = tl.load(lengths + row), tl.load(query_start + index)
    step = tl.arange(0, COUNT)
    inside = step <= count
    last = tl.load(history + row.to(tl.int64) * width + tl.minimum(length, width) - 1)
    draft = tl.load(drafts + index * most + step - 1, mask=inside & (step > 0), other=0)
    place = length - 1 + step
    page = tl.load(block_table + index.to(tl.int64) * blocks + place // PAGE, mask=inside, other=0)
    tl.store(input_ids + first + step, tl.where(step == 0, last, draft), mask=inside)
    tl.store(positions + first + step, place, mask=inside)
    tl.store(slot_mapping + first + step, page * PAGE + place % PAGE, mask=inside)
    tl.store(context_lens + index, length + count)


def launch(
    history: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...] = (),
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Write the inputs by one program per sequence. Ignores `sm_budget`: the launch is small."""
    require_contiguous("place_drafts", history=history, drafts=drafts, block_table=block_table)
    if len(rows) == 0:
        return
    most = drafts.shape[1]
    _place_kernel[(len(rows),)](
        history, lengths, drafts, rows, counts, query_start, block_table, input_ids, positions, slot_mapping,
        context_lens, history.shape[1], most, block_table.shape[1], COUNT=next_power_of_2(1 + most), PAGE=PAGE_SIZE,
        num_warps=1, **pdl_options(pdl),
    )  # fmt: skip


place_drafts = register(
    "place_drafts",
    reference,
    fake,
    launch,
    mutates=("input_ids", "positions", "slot_mapping", "context_lens"),
)
