"""Assignment of tokens to adapters, once per step for all linears.

`lora_plan` sorts a step's tokens by adapter and divides them into tiles for `lora_shrink` and `lora_expand`. A tile's
tokens share one adapter, so each of the adapter's matrices is one operand of one matrix product.

`lora_active` lists the adapters of each 128 tokens, for kernels with up to 128 tokens in a tile.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, next_power_of_2, pdl_options, pdl_start, require_contiguous


def lora_tile(num_tokens: int) -> int:
    """Return the tile height (16 to 64 tokens) for `num_tokens` tokens: small if tiles would be mostly padding."""
    return 16 if num_tokens <= 128 else 32 if num_tokens <= 256 else 64


def lora_splits(k: int, num_tokens: int) -> int:
    """Return the number of split-K planes of `lora_shrink` for `k` input features: many for few tiles.

    Measured in whole decode layers on an H200. A program loads up to 512 features of A at once, which matters most next
    to a base GEMM; but the expand reads every plane.
    """
    wide = k > 8192
    if num_tokens > 1024:
        chunk = 4096 if num_tokens > 4096 else 2048
    elif num_tokens > 32:
        chunk = 2048 if wide and num_tokens > 128 else 1024
    else:
        chunk = 512 if wide or num_tokens > 8 else 256
    return max(1, min(32, cdiv(k, chunk)))


def pairs_of_groups(order: torch.Tensor, tiles: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return (group, its tokens or pairs) for the groups of a plan, without group -1."""
    found: dict[int, list[torch.Tensor]] = {}
    for group, first, count in tiles.tolist():
        if group >= 0:
            found.setdefault(group, []).append(order[first : first + count])
    return [(group, torch.cat(parts).long()) for group, parts in found.items()]


def rounded_splits(k: int, n: int, num_tokens: int) -> int:
    """Return the number of planes for `lora_round`, with n output features: more planes take little time there.

    For 65 to 128 tokens, and for short projections up to 256, a plane has as many features as a program of the shrink
    loads at once (measured in whole decode layers on an H200).
    """
    if 64 < num_tokens <= 128 or (64 < num_tokens <= 256 and max(k, n) <= 8192 and n <= k):
        return max(1, min(32, cdiv(k, 512)))
    return lora_splits(k, num_tokens)


def num_tiles(num_tokens: int, num_slots: int, tile: int) -> int:
    """Return the rows of `tiles`: enough for the worst distribution of tokens over adapters."""
    used: Any = torch.sym_min(num_slots + 1, num_tokens)  # a symbol where `num_tokens` is one
    return cdiv(num_tokens, tile) + used


def lora_plan_reference(adapter_index: torch.Tensor, num_slots: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort tokens by adapter and divide them into tiles.

    adapter_index  [T] int32, -1 (no adapter) .. num_slots - 1
    token_order    [T] int32: tokens in stable order by adapter, those without one first
    tiles          [NT, 3] int32: (slot, first index in token_order, count <= tile), NT from `num_tiles`; slot -1:
                   tokens without adapter; unused rows (-1, 0, 0) come last

    Returns (token_order, tiles). Raises ValueError for an adapter_index out of range (the GPU kernel does not check).
    """
    slots = adapter_index.tolist()
    wrong = sorted({slot for slot in slots if not -1 <= slot < num_slots})
    if wrong:
        raise ValueError(
            f"adapter_index holds {wrong[:4]}, but the adapter stack has slots 0..{num_slots - 1} (-1 = no adapter)"
        )
    token_order = torch.sort(adapter_index, stable=True).indices.to(torch.int32)
    rows = []
    first = 0
    for slot in range(-1, num_slots):
        end = first + slots.count(slot)
        rows += [(slot, position, min(tile, end - position)) for position in range(first, end, tile)]
        first = end
    rows += [(-1, 0, 0)] * (num_tiles(len(slots), num_slots, tile) - len(rows))
    return token_order, torch.tensor(rows, dtype=torch.int32, device=adapter_index.device).reshape(-1, 3)


def lora_plan_fake(adapter_index: torch.Tensor, num_slots: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    tokens = adapter_index.shape[0]
    return adapter_index.new_empty((tokens,)), adapter_index.new_empty((num_tiles(tokens, num_slots, tile), 3))


@triton.jit
def _order_tokens(adapter_index, token_order, block, num_tokens, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    # a token's index is the number of tokens with a smaller (adapter, token) key
    token = block * TOKENS + tl.arange(0, TOKENS)
    key = (tl.load(adapter_index + token, mask=token < num_tokens, other=0) + 1) * 65536 + token
    place = tl.zeros([TOKENS], tl.int32)
    for start in range(0, num_tokens, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_key = (tl.load(adapter_index + other, mask=other < num_tokens, other=32766) + 1) * 65536 + other
        place += tl.sum((other_key[None, :] < key[:, None]).to(tl.int32), axis=1)
    tl.store(token_order + place, token, mask=token < num_tokens)


@triton.jit
def _write_tiles(
    adapter_index, tiles, block, num_tokens, num_rows, TILE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    # group g has the tokens of slot g - 1; every program counts all groups, and each row then finds its group
    tokens = tl.zeros([GROUPS], tl.int32)
    for start in range(0, num_tokens, CHUNK):
        token = start + tl.arange(0, CHUNK)
        group = tl.load(adapter_index + token, mask=token < num_tokens, other=-1) + 1
        tokens += tl.histogram(group, GROUPS, mask=token < num_tokens)
    first_token = tl.cumsum(tokens, 0) - tokens
    tiles_end = tl.cumsum((tokens + TILE - 1) // TILE, 0)
    first_tile = tiles_end - (tokens + TILE - 1) // TILE

    row = block * ROWS + tl.arange(0, ROWS)
    group_of_row = tl.sum((tiles_end[None, :] <= row[:, None]).to(tl.int32), axis=1)
    used = group_of_row < GROUPS
    here = tl.arange(0, GROUPS)[None, :] == group_of_row[:, None]
    skipped = (row - tl.sum(tl.where(here, first_tile[None, :], 0), axis=1)) * TILE
    first = tl.sum(tl.where(here, first_token[None, :], 0), axis=1) + skipped
    count = tl.minimum(tl.sum(tl.where(here, tokens[None, :], 0), axis=1) - skipped, TILE)
    tl.store(tiles + row * 3, tl.where(used, group_of_row - 1, -1), mask=row < num_rows)
    tl.store(tiles + row * 3 + 1, tl.where(used, first, 0), mask=row < num_rows)
    tl.store(tiles + row * 3 + 2, tl.where(used, count, 0), mask=row < num_rows)


@triton.jit
def plan_kernel(
    adapter_index, token_order, tiles, num_tokens, num_rows, TILE: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute blocks of two independent kinds: first blocks of ROWS tile rows, then blocks of TOKENS tokens."""
    pdl_start(PDL)
    row_blocks = tl.cdiv(num_rows, ROWS)
    blocks = row_blocks + tl.cdiv(num_tokens, TOKENS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        if block < row_blocks:
            _write_tiles(adapter_index, tiles, block, num_tokens, num_rows, TILE, GROUPS, ROWS, CHUNK)
        else:
            _order_tokens(adapter_index, token_order, block - row_blocks, num_tokens, TOKENS, CHUNK)


def lora_plan_launch(
    adapter_index: torch.Tensor,
    num_slots: int,
    tile: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out`. Raises ValueError for more than 65536 tokens or 32765 slots."""
    token_order, tiles = out
    tokens = adapter_index.shape[0]
    if tokens > 65536 or num_slots > 32765:
        raise ValueError(
            f"lora_plan sorts at most 65536 tokens over 32765 slots, not {tokens} over {num_slots}; split the step"
        )
    if tokens == 0:
        return
    groups = max(16, next_power_of_2(num_slots + 1))
    rows = max(1, min(32, 8192 // groups))
    blocks = cdiv(tiles.shape[0], rows) + cdiv(tokens, 32)
    chunk = max(32, min(256, next_power_of_2(tokens)))
    plan_kernel[(blocks if sm_budget is None else min(blocks, sm_budget),)](
        adapter_index, token_order, tiles, tokens, tiles.shape[0], TILE=tile, GROUPS=groups, ROWS=rows, TOKENS=32,
        CHUNK=chunk, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


lora_plan = register("lora_plan", lora_plan_reference, lora_plan_fake, lora_plan_launch, kind="plan", family="lora")


LIST_TOKENS = 128  # tokens that share a list


def lora_active_reference(adapter_index: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return the adapters of each 128 tokens, [ceil(T / 128), num_slots + 1] int32.

    A row has the number of different adapters, their slots in ascending order, then -1. adapter_index [T] int32 is -1
    (no adapter) .. num_slots - 1.
    """
    active = lora_active_fake(adapter_index, num_slots).fill_(-1)
    for row, tokens in zip(active, adapter_index.split(LIST_TOKENS), strict=True):
        slots = tokens[tokens >= 0].unique()
        row[0] = slots.numel()
        row[1 : 1 + slots.numel()] = slots
    return active


def lora_active_fake(adapter_index: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return an empty result."""
    return adapter_index.new_empty((cdiv(adapter_index.shape[0], LIST_TOKENS), num_slots + 1))


@triton.jit
def _active_kernel(
    adapter_index, active, tokens, num_slots, SLOTS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    """Write one list per program; -1 follows the slots of the list's adapters."""
    pdl_start(PDL)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    adapter = tl.load(adapter_index + token, mask=token < tokens, other=-1)
    slot = tl.arange(0, SLOTS)
    used = (tl.histogram(tl.maximum(adapter, 0), SLOTS, mask=adapter >= 0) > 0).to(tl.int32)
    before = tl.cumsum(used, 0) - used
    count = tl.sum(used, axis=0)
    row = active + tl.program_id(0) * (num_slots + 1)
    tl.store(row, count)
    tl.store(
        row + 1 + tl.where(used > 0, before, count + slot - before), tl.where(used > 0, slot, -1), mask=slot < num_slots
    )


def lora_active_launch(
    adapter_index: torch.Tensor,
    num_slots: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (active,) by one program per list. Ignores `sm_budget`. Does not check the range of slots."""
    require_contiguous("lora_active", adapter_index=adapter_index)
    tokens = adapter_index.shape[0]
    if tokens == 0:
        return
    _active_kernel[(cdiv(tokens, LIST_TOKENS),)](
        adapter_index, out[0], tokens, num_slots, SLOTS=max(16, next_power_of_2(num_slots)), TILE=LIST_TOKENS,
        num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


lora_active = register(
    "lora_active", lora_active_reference, lora_active_fake, lora_active_launch, kind="plan", family="lora"
)
