"""`silu_mul_blocks`: SiLU(gate) * up quantized per token and 128 columns, in one launch."""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, next_power_of_2, pdl_options, pdl_start, require_contiguous
from .quantize import E4M3
from .quantize_blocks import (
    BLOCK,
    BLOCKS_PER_CTA,
    padded_scales,
    store_quantized_blocks,
)
from .quantize_blocks import (
    fake as quantize_blocks_fake,
)
from .quantize_blocks import (
    reference as quantize_blocks_reference,
)
from .silu_mul import _silu_mul_values, silu_mul_fake, silu_mul_reference


def reference(
    gate_up: torch.Tensor, delta: Optional[torch.Tensor], dtype: torch.dtype = E4M3, rotate: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `quantize_blocks` of `silu_mul`: (q [T, I] e4m3 or int8, scale [I / 128, P] fp32).

    gate_up and delta are [T, 2I], I a multiple of 128.
    """
    return quantize_blocks_reference(silu_mul_reference(gate_up, delta), dtype, rotate)


def fake(
    gate_up: torch.Tensor, delta: Optional[torch.Tensor], dtype: torch.dtype = E4M3, rotate: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results. Raises ValueError unless gate_up is [T, 2I], I a multiple of 128, and delta like it."""
    if gate_up.dim() != 2 or gate_up.shape[1] % (2 * BLOCK) or (delta is not None and delta.shape != gate_up.shape):
        raise ValueError(
            f"silu_mul_blocks: gate_up {tuple(gate_up.shape)} must be [T, 2I] with I a multiple of {BLOCK}, and delta "
            f"{None if delta is None else tuple(delta.shape)} None or of its shape; use silu_mul_quant for other widths"
        )
    return quantize_blocks_fake(silu_mul_fake(gate_up, delta), dtype, rotate)


@triton.jit
def _silu_mul_blocks_kernel(
    gate_up, delta, q, scale, tokens, HAS_DELTA: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BLOCKS: tl.constexpr, ROTATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    first = tl.program_id(1) * BLOCKS
    column = first * 128 + tl.arange(0, BLOCKS * 128)
    pdl_start(PDL)
    values = _silu_mul_values(gate_up, delta, token.to(tl.int64), column, column < WIDTH, HAS_DELTA, WIDTH)
    store_quantized_blocks(values, q, scale, token, tokens, first, WIDTH, PADDED, BLOCKS, ROTATE)


def launch(
    gate_up: torch.Tensor,
    delta: Optional[torch.Tensor],
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (q, scale). Ignores `sm_budget`: the launch is small."""
    require_contiguous("silu_mul_blocks", gate_up=gate_up, delta=delta)
    if gate_up.numel() == 0:
        return
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    blocks = min(BLOCKS_PER_CTA, next_power_of_2(width // BLOCK))
    _silu_mul_blocks_kernel[(tokens, cdiv(width // BLOCK, blocks))](
        gate_up,
        delta,
        *out,
        tokens,
        HAS_DELTA=delta is not None,
        WIDTH=width,
        PADDED=padded_scales(tokens),
        BLOCKS=blocks,
        ROTATE=max(1, rotate),
        num_warps=max(1, blocks // 2),  # 8 columns (16 bytes) of a 16-bit gate per thread
        **pdl_options(pdl),
    )


silu_mul_blocks = register(
    "silu_mul_blocks",
    reference,
    fake,
    launch,
    kind="silu_mul",
    family="silu",
)
