"""Decode attention of several sequences to pages that they share, which are read once (cascade attention).

Sequences with the same first tokens have the same first pages, from the prefix cache. `prefix_plan` finds them once per
step, among the consecutive sequences of a tile: a product of the tensor cores has that many rows. The sequence whose
first pages most others of the tile have too is the owner of the tile's prefix. All with at least MIN_PREFIX_PAGES of
its pages share it. `prefix_attention` attends to the prefix. `paged_attention` and its other forms read the remaining
pages of each sequence and merge both.
"""

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors
from ..core.dtypes import QUANTIZED_MAX
from ..core.kv_layout import MIN_PREFIX_PAGES, MIN_PREFIX_SEQUENCES, PAGE_SIZE
from ..core.registry import register
from ..core.triton_support import cdiv, pdl_options, pdl_start, require_contiguous
from . import prefill_gluon
from .numerics import LOG2_E
from .paged_attention import gather_keys_values, takes_prefix
from .prefill_gluon_tiles import PART_STEPS, PREFIXES

MAX_PARTS = 8  # of a prefix; each is read by another program
SHARED, PAGES, OWNER = range(3)  # rows of the plan


def prefix_plan_reference(block_table: torch.Tensor, context_lens: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the plan [3, B] int32 of the shared pages of each `tile` consecutive sequences, a power of two.

    block_table [B, P], context_lens [B]: int32, as in `paged_attention` with `decode`
    plan[0, b]  pages that sequence b shares; 0: none
    plan[1, t]  pages of the prefix of tile t, an even number: those of its sequences with plan[0, b] > 0; 0: none
    plan[2, t]  the sequence whose block table has them

    Only full pages before a sequence's newest token are shared.
    """
    sequences, blocks = block_table.shape
    plan = torch.zeros(3, sequences, dtype=torch.int32)
    table = block_table.cpu()
    full = ((context_lens.cpu() - 1).clamp_min(0) // PAGE_SIZE).clamp_max(blocks)
    for number, first in enumerate(range(0, sequences, tile)):
        rows = range(first, min(first + tile, sequences))
        able = [row for row in rows if full[row] >= MIN_PREFIX_PAGES]
        keys = [int(table[row, MIN_PREFIX_PAGES - 1]) for row in able]
        if not able or max(keys.count(key) for key in keys) < MIN_PREFIX_SEQUENCES:
            continue
        owner = max(able, key=lambda row: (keys.count(int(table[row, MIN_PREFIX_PAGES - 1])), -row))
        lengths = {}
        for row in able:
            same = (table[row] == table[owner]).int().cumprod(0).sum()
            length = min(int(same), int(full[row]), int(full[owner]))
            if length >= MIN_PREFIX_PAGES:
                lengths[row] = length
        pages = min(lengths.values()) // 2 * 2
        for row in lengths:
            plan[SHARED, row] = pages
        plan[PAGES, number], plan[OWNER, number] = pages, owner
    return plan.to(block_table.device)


def prefix_plan_fake(block_table: torch.Tensor, context_lens: torch.Tensor, tile: int) -> torch.Tensor:
    """Return an empty result."""
    return block_table.new_empty((3, block_table.shape[0]))


@triton.jit(do_not_specialize=["sequences", "num_blocks"])
def _plan_kernel(
    block_table, context_lens, plan, sequences, num_blocks, TILE: tl.constexpr, PAGE: tl.constexpr,
    MIN_PAGES: tl.constexpr, MIN_SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Plan one tile."""
    pdl_start(PDL)
    number = tl.program_id(0)
    row = tl.arange(0, TILE)
    sequence = number * TILE + row
    real = sequence < sequences
    context = tl.load(context_lens + sequence, mask=real, other=0)
    full = tl.minimum(tl.maximum(context - 1, 0) // PAGE, num_blocks)
    able = full >= MIN_PAGES
    tables = block_table + sequence.to(tl.int64) * num_blocks
    key = tl.load(tables + (MIN_PAGES - 1), mask=able, other=-1)
    alike = (key[:, None] == key[None, :]) & able[:, None] & able[None, :]
    count = tl.sum(alike.to(tl.int32), 1)
    most = tl.max(count, 0)
    owner = tl.min(tl.where(count == most, row, TILE), 0)
    length = tl.where(able & (most >= MIN_SEQUENCES), full, 0)
    owned = tl.sum(tl.where(row == owner, full, 0), 0)
    own_table = block_table + (number * TILE + owner).to(tl.int64) * num_blocks
    block = tl.arange(0, CHUNK)
    first = 0
    longest = tl.minimum(tl.max(length, 0), owned)
    while first < longest:
        inside = first + block < longest
        theirs = tl.load(tables[:, None] + first + block[None, :], mask=able[:, None] & inside[None, :], other=-1)
        ours = tl.load(own_table + first + block, mask=inside, other=-2)
        place = tl.where(theirs == ours[None, :], num_blocks, first + block[None, :])
        length = tl.minimum(length, tl.min(place, 1))
        longest = tl.minimum(longest, tl.max(length, 0))
        first += CHUNK
    length = tl.minimum(length, owned)
    joins = length >= MIN_PAGES
    pages = tl.min(tl.where(joins, length, num_blocks), 0) // 2 * 2
    pages = tl.where(tl.max(joins.to(tl.int32), 0) > 0, pages, 0)
    tl.store(plan + sequence, tl.where(joins, pages, 0), mask=real)
    entry = number + tl.num_programs(0) * row  # the rows have more entries than there are tiles
    tl.store(plan + sequences + entry, tl.where(row == 0, pages, 0), mask=entry < sequences)
    owner = tl.where((row == 0) & (pages > 0), number * TILE + owner, 0)
    tl.store(plan + 2 * sequences + entry, owner, mask=entry < sequences)


def prefix_plan_launch(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    tile: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (plan,) by one program per tile. Ignores `sm_budget`."""
    require_contiguous("prefix_plan", block_table=block_table, context_lens=context_lens)
    sequences, num_blocks = block_table.shape
    _plan_kernel[(cdiv(sequences, tile),)](
        block_table, context_lens, out[0], sequences, num_blocks, TILE=tile, PAGE=PAGE_SIZE, MIN_PAGES=MIN_PREFIX_PAGES,
        MIN_SEQUENCES=MIN_PREFIX_SEQUENCES, CHUNK=max(1, 1024 // tile), num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


prefix_plan = register("prefix_plan", prefix_plan_reference, prefix_plan_fake, prefix_plan_launch, kind="plan")


def parts_of(sequences: int, heads: int, kv_heads: int, num_blocks: int, device: torch.device) -> int:
    """Return the number of parts of each prefix, so that tiles of all `sequences` fill the SMs."""
    tiles = cdiv(sequences, prefill_gluon.tile_tokens(heads, kv_heads)) * kv_heads
    return max(1, min(multiprocessors(device) // tiles, MAX_PARTS, num_blocks // (2 * int(PART_STEPS))))


def check(q: torch.Tensor, kv_cache: torch.Tensor, plan: torch.Tensor) -> None:
    """Raise ValueError, naming the argument, unless the kernels support q and the cache, and the plan belongs to q."""
    sequences, heads, dim = q.shape
    if not takes_prefix(heads, kv_cache.shape[1], dim, kv_cache.dtype):
        raise ValueError(
            f"prefix_attention needs an 8-bit cache with head_dim {prefill_gluon.HEAD_DIM} and 1 to 8 query heads per "
            f"KV head (a power of two), not {kv_cache.dtype}, head_dim {dim} and {heads} heads on {kv_cache.shape[1]}"
        )
    if tuple(plan.shape) != (3, sequences):
        raise ValueError(f"plan is {tuple(plan.shape)}; with q of {sequences} rows it must be {(3, sequences)}")


def prefix_attention_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    block_table: torch.Tensor,
    plan: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the newest token of each sequence to the prefix of its tile, in parts.

    q [B, HQ, 128]; kv_cache and kv_scales as in `paged_attention`, int8 or e4m3; plan from `prefix_plan` with the tile
    of `prefill_gluon.tile_tokens`. Returns fp32 (o [parts, B, HQ, 128], log2-sum-exp [parts, B, HQ]). Sequences that
    share no pages, and parts without pages, have zeros here; on a GPU they are not written, or have other values.
    """
    check(q, kv_cache, plan)
    sequences, heads, dim = q.shape
    kv_heads = kv_cache.shape[1]
    o, lse = prefix_attention_fake(q, kv_cache, kv_scales, block_table, plan, softmax_scale)
    o.zero_()
    lse.zero_()
    tile = prefill_gluon.tile_tokens(heads, kv_heads)
    for number in range(cdiv(sequences, tile)):
        pages, owner = int(plan[PAGES, number]), int(plan[OWNER, number])
        rows = [b for b in range(number * tile, min(sequences, (number + 1) * tile)) if plan[SHARED, b] > 0]
        share = 2 * max(cdiv(pages // 2, o.shape[0]), int(PART_STEPS))
        for part, first in enumerate(range(0, pages, share)):
            own = block_table[owner, first : min(first + share, pages)].long()
            keys, values = gather_keys_values(kv_cache, kv_scales, own, len(own) * PAGE_SIZE)
            queries = q[rows].float().view(len(rows), kv_heads, -1, dim)
            scores = torch.einsum("bkgd,ksd->bkgs", queries, keys) * (softmax_scale * LOG2_E)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp2(scores - top)
            total = weights.sum(-1, keepdim=True)
            o[part, rows] = (torch.einsum("bkgs,ksd->bkgd", weights, values) / total).reshape(len(rows), heads, dim)
            lse[part, rows] = (top + total.log2()).reshape(len(rows), heads)
    return o, lse


def prefix_attention_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    block_table: torch.Tensor,
    plan: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    sequences, heads, dim = q.shape
    parts = parts_of(sequences, heads, kv_cache.shape[1], block_table.shape[1], q.device)
    return (
        q.new_empty((parts, sequences, heads, dim), dtype=torch.float32),
        q.new_empty((parts, sequences, heads), dtype=torch.float32),
    )


def prefix_attention_launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    block_table: torch.Tensor,
    plan: torch.Tensor,
    softmax_scale: float,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (o, log2-sum-exp) of sequences that share pages. Ignores `sm_budget`."""
    check(q, kv_cache, plan)
    (sequences, heads, _), kv_heads, parts = q.shape, kv_cache.shape[1], out[0].shape[0]
    tile = prefill_gluon.tile_tokens(heads, kv_heads)
    units = cdiv(sequences, tile) * parts
    prefill_gluon.prefill_kernel[min(units * kv_heads, multiprocessors(q.device)),](
        *prefill_gluon.descriptors(kv_cache, kv_scales), q, block_table, plan, plan, plan, q, *out, plan,
        softmax_scale * LOG2_E, sequences, sequences, block_table.shape[1], units, 0, parts, HK=kv_heads,
        GROUP=heads // kv_heads, TILE=tile, PLANNED=False, FP8_SCORES=False, LIMIT=QUANTIZED_MAX[kv_cache.dtype],
        STAGES=2, RAW=3, WARPS=prefill_gluon.CONVERTERS, REGISTERS=prefill_gluon.REGISTERS, WINDOW=0,
        SPLIT=int(PREFIXES), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


prefix_attention = register(
    "prefix_attention",
    prefix_attention_reference,
    prefix_attention_fake,
    prefix_attention_launch,
    kind="attention",
    family="attention",
)
