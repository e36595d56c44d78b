"""Which adapters meet in a decode step, for kernels that hold all its tokens in one tile: once a step, for every layer.

Such a kernel cuts the tokens in up to four quarters, so the lists are made for the whole tile, its halves and its
quarters.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import next_power_of_2, pdl_options, pdl_start

MAX_TOKENS = 64
LISTS = 7  # all tokens; first, second half; first .. fourth quarter
POSITIONS = 7  # rows 7, 8, 9: each token's place in the list of all, of its half, of its quarter
COUNTS = 10  # row 10: how many entries each list has
ROWS = 11


def tile_tokens(tokens: int) -> int:
    """The height of the tile that holds this many tokens: 16, 32 or 64."""
    return max(16, next_power_of_2(tokens))


def lora_groups_reference(adapter_index: torch.Tensor) -> torch.Tensor:
    """adapter_index [T] int32, T <= 64, -1 = no adapter -> [11, 64] int32.

    Rows 0..6: the different adapters of all tokens, of each half and of each quarter of the tile (`tile_tokens`), by
    first appearance, -1 past the end. Rows 7..9: for each token the place of its adapter in the list of all, of its
    half, of its quarter; -1 without adapter and past T. Row 10: the lists' lengths, then zeros.
    """
    index = adapter_index.tolist()
    tile = tile_tokens(len(index))
    groups = torch.full((ROWS, MAX_TOKENS), -1, dtype=torch.int32)
    groups[COUNTS] = 0
    for level, parts in enumerate((1, 2, 4)):
        for part in range(parts):
            row = parts - 1 + part
            found: list[int] = []
            for token in range(part * tile // parts, min(len(index), (part + 1) * tile // parts)):
                if index[token] >= 0:
                    if index[token] not in found:
                        found.append(index[token])
                    groups[POSITIONS + level, token] = found.index(index[token])
            groups[row, : len(found)] = torch.tensor(found, dtype=torch.int32)
            groups[COUNTS, row] = len(found)
    return groups.to(adapter_index.device)


def lora_groups_fake(adapter_index: torch.Tensor) -> torch.Tensor:
    if adapter_index.shape[0] > MAX_TOKENS:
        raise ValueError(f"lora_groups: {adapter_index.shape[0]} tokens; it takes up to {MAX_TOKENS}")
    return adapter_index.new_empty((ROWS, MAX_TOKENS), dtype=torch.int32)


@triton.jit
def _groups_kernel(adapter_index, groups, tokens, TILE: tl.constexpr, PDL: tl.constexpr):
    """One program a level: 0 all tokens, 1 the halves, 2 the quarters.

    Rows of a comparison are tokens, columns the tokens they are held against.
    """
    pdl_start(PDL)
    level = tl.program_id(0)
    part_tokens = TILE >> level
    token = tl.arange(0, 64)
    adapter = tl.load(adapter_index + token, mask=token < tokens, other=-1)
    part = token // part_tokens
    same = (adapter[:, None] == adapter[None, :]) & (part[:, None] == part[None, :]) & (adapter >= 0)[:, None]
    first_of_row = tl.min(tl.where(same, token[None, :], 64), axis=1)
    first_of_column = tl.min(tl.where(same, token[:, None], 64), axis=0)
    leads = first_of_column == token  # as columns
    place = tl.sum(
        (leads[None, :] & (part[:, None] == part[None, :]) & (token[None, :] < first_of_row[:, None])).to(tl.int32),
        axis=1,
    )
    tl.store(groups + (7 + level) * 64 + token, tl.where(adapter >= 0, place, -1))
    leader = (first_of_row == token) & (adapter >= 0)
    for each in range(0, 1 << level):
        row = (1 << level) - 1 + each
        chosen = leader & (part == each)
        entry = (
            tl.sum(tl.where(chosen[:, None] & (place[:, None] == token[None, :]), adapter[:, None] + 1, 0), axis=0) - 1
        )
        tl.store(groups + row * 64 + token, entry)
        tl.store(groups + 10 * 64 + row, tl.sum(chosen.to(tl.int32), axis=0))
    if level == 0:
        tl.store(groups + 10 * 64 + token, tl.zeros_like(token), mask=token >= 7)


def lora_groups_launch(
    adapter_index: torch.Tensor, *, out: tuple[torch.Tensor, ...], sm_budget: Optional[int] = None, pdl: bool = False
) -> None:
    """Three programs, whatever `sm_budget` says."""
    tokens = adapter_index.shape[0]
    _groups_kernel[(3,)](adapter_index, out[0], tokens, TILE=tile_tokens(tokens), num_warps=4, **pdl_options(pdl))


lora_groups = register(
    "lora_groups", lora_groups_reference, lora_groups_fake, lora_groups_launch, kind="plan", family="lora"
)
