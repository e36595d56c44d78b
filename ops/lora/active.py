"""Which adapters the tokens of a decode step use, for kernels that hold up to 128 tokens in a tile: once a step, for
every layer.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, next_power_of_2, pdl_options, pdl_start, require_contiguous

TILE = 128  # tokens that share a list


def lora_active_reference(adapter_index: torch.Tensor, num_slots: int) -> torch.Tensor:
    """adapter_index [T] int32, -1 (no adapter) .. num_slots - 1 -> [ceil(T / 128), num_slots + 1] int32.

    A row for each 128 tokens: how many different adapters they have, their slots in ascending order, -1 behind.
    """
    active = lora_active_fake(adapter_index, num_slots).fill_(-1)
    for row, tokens in zip(active, adapter_index.split(TILE), strict=True):
        slots = tokens[tokens >= 0].unique()
        row[0] = slots.numel()
        row[1 : 1 + slots.numel()] = slots
    return active


def lora_active_fake(adapter_index: torch.Tensor, num_slots: int) -> torch.Tensor:
    return adapter_index.new_empty((cdiv(adapter_index.shape[0], TILE), num_slots + 1))


@triton.jit
def _active_kernel(
    adapter_index, active, tokens, num_slots, SLOTS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    """One program for each list. Slots that no token has are written behind those that some have, as -1."""
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
    """A program for each list, whatever `sm_budget` says. Slots out of range are not looked for."""
    require_contiguous("lora_active", adapter_index=adapter_index)
    tokens = adapter_index.shape[0]
    if tokens == 0:
        return
    _active_kernel[(cdiv(tokens, TILE),)](
        adapter_index,
        out[0],
        tokens,
        num_slots,
        SLOTS=max(16, next_power_of_2(num_slots)),
        TILE=TILE,
        num_warps=4,
        **pdl_options(pdl),
    )


lora_active = register(
    "lora_active", lora_active_reference, lora_active_fake, lora_active_launch, kind="plan", family="lora"
)
