"""Which sequences of a prompt step have their keys and values widened, and where these lie then: once a step, for every
layer.

Attention of many queries multiplies each key and value in fp16 many times. Where a sequence has enough queries,
`widen_kv` makes fp16 of its cache once; the others, decode rows among them, are converted by the tile that reads them.
Which is which is decided here, on the GPU, which alone knows the lengths.
"""

import torch
import triton
import triton.language as tl

from ..core.kv_layout import PAGE_SIZE
from ..core.registry import register
from ..core.triton_support import cdiv, next_power_of_2, pdl_options, pdl_start, require_contiguous

STEP_TOKENS = 128  # of two pages: what attention multiplies at once
# A sequence with fewer tiles of queries is left: writing fp16 and reading it again takes about as long as four tiles
# gain, by bytes and by the kernels' rates.
FEWEST_TILES = 4
PLACES, WIDE_TILES, NARROW_TILES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # rows of the plan


def reference(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    tile: int,
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of at least four tiles of `tile` queries are widened, in order, as long as their context fits into
    `steps` steps of 128 tokens.

    block_table [B, P], context_lens [B], query_start [B + 1]: int32, as in `paged_attention`.
    Returns (plan, pages), int32.
    plan [3, B + 1]   for each sequence its first step among the widened ones (-1: it stays as it is), then how many
                      tiles the widened sequences before it have, and the others before it; behind the last sequence the
                      three sums
    pages [steps, 2]  the cache's pages of each step, in order; the last one of an odd number twice; -1 behind the last
                      step
    """
    starts, contexts = query_start.tolist(), context_lens.tolist()
    rows: list[list[int]] = [[], [], []]
    listed: list[int] = []
    wanted = used = wide_tiles = narrow_tiles = 0
    for sequence, context in enumerate(contexts):
        count, place, length = starts[sequence + 1] - starts[sequence], wanted, cdiv(context, STEP_TOKENS)
        enough = count >= FEWEST_TILES * tile
        wanted += length * enough
        widened = enough and wanted <= steps
        for row, value in zip(rows, (place if widened else -1, wide_tiles, narrow_tiles), strict=True):
            row.append(value)
        tiles = cdiv(count, tile)
        wide_tiles, narrow_tiles = wide_tiles + tiles * widened, narrow_tiles + tiles * (not widened)
        if widened:
            used = wanted
            last = cdiv(context, PAGE_SIZE) - 1
            listed += [int(block_table[sequence, min(block, last)]) for block in range(2 * length)]
    for row, value in zip(rows, (used, wide_tiles, narrow_tiles), strict=True):
        row.append(value)
    listed += [-1] * (2 * steps - len(listed))
    device = block_table.device
    return torch.tensor(rows, dtype=torch.int32, device=device), torch.tensor(
        listed, dtype=torch.int32, device=device
    ).view(steps, 2)


def fake(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    tile: int,
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return block_table.new_empty((3, block_table.shape[0] + 1)), block_table.new_empty((steps, 2))


@triton.jit(do_not_specialize=["sequences", "num_blocks", "steps"])
def _plan_kernel(
    block_table, context_lens, query_start, plan, pages, sequences, num_blocks, steps, TILE: tl.constexpr,
    FEWEST: tl.constexpr, SEQUENCES: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program b lists the pages of sequence b; program B writes the plan, and -1 behind the last page."""
    pdl_start(PDL)
    own = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    real = index < sequences
    start = tl.load(query_start + index, mask=real, other=0)
    count = tl.load(query_start + index + 1, mask=real, other=0) - start
    context = tl.load(context_lens + index, mask=real, other=0)
    enough = (count >= FEWEST * TILE) & real
    length = tl.where(enough, (context + STEP - 1) // STEP, 0)
    end = tl.cumsum(length, 0)
    widened = enough & (end <= steps)
    used = tl.max(tl.where(widened, end, 0), 0)
    if own == sequences:
        tiles = tl.where(real, (count + TILE - 1) // TILE, 0)
        wide = tl.where(widened, tiles, 0)
        narrow = tiles - wide
        row = sequences + 1
        there = index <= sequences
        tl.store(plan + index, tl.where(real, tl.where(widened, end - length, -1), used), mask=there)
        tl.store(plan + row + index, tl.cumsum(wide, 0) - wide, mask=there)
        tl.store(plan + 2 * row + index, tl.cumsum(narrow, 0) - narrow, mask=there)
        entry = tl.arange(0, CHUNK)
        for first in range(2 * used, 2 * steps, CHUNK):
            tl.store(pages + first + entry, tl.full([CHUNK], -1, tl.int32), mask=first + entry < 2 * steps)
    else:
        here = index == own
        if tl.sum(tl.where(here & widened, 1, 0), 0) > 0:
            place = 2 * tl.sum(tl.where(here, end - length, 0), 0)
            entries = 2 * tl.sum(tl.where(here, length, 0), 0)
            last = (tl.sum(tl.where(here, context, 0), 0) + PAGE - 1) // PAGE - 1
            block = tl.arange(0, CHUNK)
            for first in range(0, entries, CHUNK):
                inside = first + block < entries
                page = tl.load(
                    block_table + own.to(tl.int64) * num_blocks + tl.minimum(first + block, last), mask=inside, other=0
                )
                tl.store(pages + place + first + block, page, mask=inside)


def launch(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    tile: int,
    steps: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """A program for each sequence and one more, whatever `sm_budget` says."""
    plan, pages = out
    require_contiguous("widen_plan", block_table=block_table, context_lens=context_lens, query_start=query_start)
    sequences, num_blocks = block_table.shape
    _plan_kernel[(sequences + 1,)](
        block_table,
        context_lens,
        query_start,
        plan,
        pages,
        sequences,
        num_blocks,
        steps,
        TILE=tile,
        FEWEST=FEWEST_TILES,
        SEQUENCES=max(16, next_power_of_2(sequences + 1)),
        STEP=STEP_TOKENS,
        PAGE=PAGE_SIZE,
        CHUNK=256,
        num_warps=4,
        **pdl_options(pdl),
    )


widen_plan = register("widen_plan", reference, fake, launch, kind="plan")
