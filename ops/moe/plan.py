"""Pairs sorted by group and divided into tiles, for kernels that multiply the pairs of a tile by one matrix.

A group is an expert, or an adapter's expert (`expert_groups`). `group_plan` has three forms:

- few pairs in few groups: the kernel of `lora_plan`
- few pairs in many groups: tiles of one pair, since most pairs have a group of their own; a pair's place is the number
  of pairs before it, and no kernel looks at all groups
- otherwise a counting sort in three launches: pairs of each block and group, sums over blocks and groups, places
"""

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, pdl_options, pdl_start, require_contiguous
from ..lora.plan import lora_plan_launch, num_tiles

FEW_PAIRS = 2048  # most pairs of the first form
MANY_GROUPS = 1024  # fewest groups of the second form, and its most pairs; fewer groups have the first form
MAX_PAIRS, MAX_GROUPS = 1 << 20, 1 << 20
_MOST_COUNTS = 1 << 23  # elements of the counting sort's table of blocks and groups
_BLOCKS = 64  # blocks of pairs that the scan loads at once
_PAIRS = 32  # pairs whose places a program computes at once
_ROWS = 128  # rows of `tiles` that a program writes at once


def has_single_tiles(pairs: int, num_groups: int) -> bool:
    """Return whether a plan has the second form."""
    return pairs <= MANY_GROUPS <= num_groups


def group_plan_reference(groups: torch.Tensor, num_groups: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by group and divide them into tiles.

    groups  [P] int32, -1 (no group) .. num_groups - 1
    order   [P] int32: pairs in stable order by group, those without one first
    tiles   [NT, 3] int32: (group, first index in order, count <= tile), NT from `num_tiles`; group -1: pairs without
            group; unused rows (-1, 0, 0) come last

    Returns (order, tiles). Raises ValueError for a group out of range (the GPU kernels do not check).
    """
    wrong = groups[(groups < -1) | (groups >= num_groups)].unique()
    if wrong.numel():
        raise ValueError(f"groups holds {wrong[:4].tolist()}, but there are groups 0..{num_groups - 1} (-1 = none)")
    order = torch.sort(groups, stable=True).indices.to(torch.int32)
    tiles = group_plan_fake(groups, num_groups, tile)[1].zero_()
    tiles[:, 0] = -1
    tile = 1 if has_single_tiles(len(groups), num_groups) else tile
    sizes = torch.bincount(groups.long() + 1, minlength=num_groups + 1)
    own_tiles = (sizes + tile - 1) // tile
    group = torch.arange(num_groups + 1, device=groups.device).repeat_interleave(own_tiles)
    first_tile, first_pair = own_tiles.cumsum(0) - own_tiles, sizes.cumsum(0) - sizes
    skipped = (torch.arange(len(group), device=groups.device) - first_tile[group]) * tile
    count = (sizes[group] - skipped).clamp(max=tile)
    tiles[: len(group)] = torch.stack([group - 1, first_pair[group] + skipped, count], 1).to(torch.int32)
    return order, tiles


def group_plan_fake(groups: torch.Tensor, num_groups: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    pairs = groups.shape[0]
    return groups.new_empty((pairs,)), groups.new_empty((num_tiles(pairs, num_groups, tile), 3))


@triton.jit
def _single_kernel(
    groups, order, tiles, num_pairs, num_rows, PAIRS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Write the places of PAIRS pairs, a tile for each, and as many of the unused rows, which are not more."""
    pdl_start(PDL)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < num_pairs
    group = tl.load(groups + pair, mask=inside, other=0)
    place = tl.zeros([PAIRS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(groups + other, mask=other < num_pairs, other=0x7FFFFFFF)[None, :]
        before = (theirs < group[:, None]) | ((theirs == group[:, None]) & (other[None, :] < pair[:, None]))
        place += tl.sum(before.to(tl.int32), axis=1)
    tl.store(order + place, pair, mask=inside)
    tl.store(tiles + place * 3, group, mask=inside)
    tl.store(tiles + place * 3 + 1, place, mask=inside)
    tl.store(tiles + place * 3 + 2, 1, mask=inside)
    row = num_pairs + pair
    tl.store(tiles + row * 3, -1, mask=row < num_rows)
    tl.store(tiles + row * 3 + 1, 0, mask=row < num_rows)
    tl.store(tiles + row * 3 + 2, 0, mask=row < num_rows)


@triton.jit
def _count_kernel(
    groups, counts, arrived, num_pairs, bins, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Count the pairs of each group in one block of pairs, into a row of counts; bin g + 1 is group g."""
    pdl_start(PDL)
    tl.store(arrived, 0)  # for the next kernel
    row = counts + tl.program_id(0).to(tl.int64) * bins
    place = tl.arange(0, CHUNK)
    for start in range(0, bins, CHUNK):
        tl.store(row + start + place, 0, mask=start + place < bins)
    tl.debug_barrier()
    for start in range(0, BLOCK, CHUNK):
        pair = tl.program_id(0) * BLOCK + start + place
        group = tl.load(groups + pair, mask=pair < num_pairs, other=-1)
        tl.atomic_add(row + group + 1, 1, mask=pair < num_pairs, sem="relaxed")


@triton.jit
def _scan_kernel(
    counts, first, tiles_end, arrived, blocks, bins, TILE: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Replace the counts of BINS bins by those of all earlier blocks; the last program to arrive sums over the bins.

    first[bin] is the place of the bin's first pair, tiles_end[bin] the row after its last tile.
    """
    pdl_start(PDL)
    own = tl.program_id(0) * BINS + tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        at = counts + block.to(tl.int64)[:, None] * bins + own[None, :]
        inside = (block < blocks)[:, None] & (own < bins)[None, :]
        here = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(here, axis=0) - here, mask=inside)
        total += tl.sum(here, axis=0)
    tl.store(first + own, total, mask=own < bins)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        pairs_before, tiles_before = 0, 0
        for start in range(0, bins, CHUNK):
            each = start + tl.arange(0, CHUNK)
            pairs = tl.load(first + each, mask=each < bins, other=0, cache_modifier=".cg")
            tiles = (pairs + TILE - 1) // TILE
            tl.store(first + each, pairs_before + tl.cumsum(pairs, 0) - pairs, mask=each < bins)
            tl.store(tiles_end + each, tiles_before + tl.cumsum(tiles, 0), mask=each < bins)
            pairs_before += tl.sum(pairs, axis=0)
            tiles_before += tl.sum(tiles, axis=0)


@triton.jit
def _write_tiles(
    tiles, first, tiles_end, block, num_pairs, num_rows, bins, TILE: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = block * ROWS + tl.arange(0, ROWS)
    bin = tl.zeros([ROWS], tl.int32)  # the number of bins that end before the row, by bisection
    for step in tl.static_range(STEPS):
        further = bin + 2 ** (STEPS - 1 - step)
        ends = tl.load(tiles_end + further - 1, mask=further <= bins, other=0x7FFFFFFF)
        bin = tl.where(ends <= row, further, bin)
    used = (bin < bins) & (row < num_rows)
    begins = tl.load(tiles_end + bin - 1, mask=used & (bin > 0), other=0)
    pair = tl.load(first + bin, mask=used, other=0) + (row - begins) * TILE
    end = tl.load(first + bin + 1, mask=used & (bin + 1 < bins), other=0)
    end = tl.where(bin + 1 < bins, end, num_pairs)
    tl.store(tiles + row * 3, tl.where(used, bin - 1, -1), mask=row < num_rows)
    tl.store(tiles + row * 3 + 1, tl.where(used, pair, 0), mask=row < num_rows)
    tl.store(tiles + row * 3 + 2, tl.where(used, tl.minimum(end - pair, TILE), 0), mask=row < num_rows)


@triton.jit
def _scatter_kernel(
    groups, order, tiles, counts, first, tiles_end, num_pairs, num_rows, bins, BLOCK: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write blocks of ROWS rows of tiles, then the places of blocks of PAIRS pairs."""
    pdl_start(PDL)
    row_blocks = tl.cdiv(num_rows, ROWS)
    for work in range(tl.program_id(0), row_blocks + tl.cdiv(num_pairs, PAIRS), tl.num_programs(0)):
        if work < row_blocks:
            _write_tiles(tiles, first, tiles_end, work, num_pairs, num_rows, bins, TILE, STEPS, ROWS)
        else:
            start_pair = (work - row_blocks) * PAIRS
            pair = start_pair + tl.arange(0, PAIRS)
            inside = pair < num_pairs
            bin = tl.load(groups + pair, mask=inside, other=-1) + 1
            block = start_pair // BLOCK
            place = tl.load(first + bin, mask=inside, other=0)
            place += tl.load(counts + block.to(tl.int64) * bins + bin, mask=inside, other=0)
            for start in range(block * BLOCK, start_pair + PAIRS, CHUNK):  # earlier pairs of the block
                other = start + tl.arange(0, CHUNK)
                theirs = tl.load(groups + other, mask=other < num_pairs, other=-2) + 1
                before = (theirs[None, :] == bin[:, None]) & (other[None, :] < pair[:, None])
                place += tl.sum(before.to(tl.int32), axis=1)
            tl.store(order + place, pair, mask=inside)


def group_plan_launch(
    groups: torch.Tensor,
    num_groups: int,
    tile: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out`. Raises ValueError for more than 2**20 pairs or groups."""
    order, tiles = out
    pairs = groups.shape[0]
    require_contiguous("group_plan", groups=groups)
    if pairs > MAX_PAIRS or num_groups > MAX_GROUPS:
        raise ValueError(
            f"group_plan sorts at most {MAX_PAIRS} pairs over {MAX_GROUPS} groups, not {pairs} over {num_groups}; "
            "split the step"
        )
    if pairs == 0:
        return
    if has_single_tiles(pairs, num_groups):
        _single_kernel[(cdiv(pairs, _PAIRS),)](
            groups, order, tiles, pairs, tiles.shape[0], PAIRS=_PAIRS, CHUNK=64 if pairs <= 64 else 256, num_warps=4,
            **pdl_options(pdl),
        )  # fmt: skip
    elif pairs <= FEW_PAIRS and num_groups < MANY_GROUPS:
        lora_plan_launch(groups, num_groups, tile, out=out, sm_budget=sm_budget, pdl=pdl)
    else:
        _counting_sort(groups, num_groups, tile, order, tiles, sm_budget, pdl)


def _counting_sort(
    groups: torch.Tensor,
    num_groups: int,
    tile: int,
    order: torch.Tensor,
    tiles: torch.Tensor,
    sm_budget: int | None,
    pdl: bool,
) -> None:
    pairs, bins, rows = groups.shape[0], num_groups + 1, tiles.shape[0]
    block = 1024
    while cdiv(pairs, block) * bins > _MOST_COUNTS:
        block *= 2
    blocks = cdiv(pairs, block)
    # no workspace: plans of two lanes may run at the same time
    scratch = torch.empty((blocks + 2) * bins + 1, dtype=torch.int32, device=groups.device)
    counts, first, tiles_end, arrived = scratch.split([blocks * bins, bins, bins, 1])
    options = pdl_options(pdl)
    _count_kernel[(blocks,)](groups, counts, arrived, pairs, bins, BLOCK=block, CHUNK=1024, num_warps=8, **options)
    _scan_kernel[(cdiv(bins, 32),)](
        counts, first, tiles_end, arrived, blocks, bins, TILE=tile, BLOCKS=_BLOCKS, BINS=32, CHUNK=2048, num_warps=8,
        **options,
    )  # fmt: skip
    work = cdiv(rows, _ROWS) + cdiv(pairs, _PAIRS)
    _scatter_kernel[(work if sm_budget is None else min(work, sm_budget),)](
        groups, order, tiles, counts, first, tiles_end, pairs, rows, bins, BLOCK=block, TILE=tile,
        STEPS=bins.bit_length(), ROWS=_ROWS, PAIRS=_PAIRS, CHUNK=256, num_warps=4, **options,
    )  # fmt: skip


group_plan = register("group_plan", group_plan_reference, group_plan_fake, group_plan_launch, kind="plan", family="moe")


def expert_groups_reference(adapter_index: torch.Tensor, experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the groups of pairs for LoRA on experts, [T * k] int32: slot * num_experts + expert, or -1.

    adapter_index  [T] int32, -1 = no adapter
    experts        [T, k] int32, -1 = none
    """
    slot = adapter_index.unsqueeze(1)
    return torch.where((slot < 0) | (experts < 0), -1, slot * num_experts + experts).reshape(-1)


def expert_groups_fake(adapter_index: torch.Tensor, experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return an empty result."""
    return experts.new_empty((experts.shape[0] * experts.shape[1],))


@triton.jit
def _groups_kernel(
    adapter_index, experts, groups, num_pairs, top_k, num_experts, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pdl_start(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(adapter_index + pair // top_k, mask=pair < num_pairs, other=-1)
    expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
    group = tl.where((slot < 0) | (expert < 0), -1, slot * num_experts + expert)
    tl.store(groups + pair, group, mask=pair < num_pairs)


def expert_groups_launch(
    adapter_index: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (groups,). Ignores `sm_budget`: the launch is small."""
    require_contiguous("expert_groups", adapter_index=adapter_index, experts=experts)
    pairs = experts.numel()
    if pairs:
        _groups_kernel[(cdiv(pairs, 256),)](
            adapter_index, experts, out[0], pairs, experts.shape[1], num_experts, BLOCK=256, num_warps=4,
            **pdl_options(pdl),
        )  # fmt: skip


expert_groups = register(
    "expert_groups", expert_groups_reference, expert_groups_fake, expert_groups_launch, kind="plan", family="moe"
)
