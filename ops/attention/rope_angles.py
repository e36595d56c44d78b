"""`rope_angles`: cos and sin of each token's rotary angles, once a step for all layers."""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import pdl_options, pdl_start


def rope_angles_reference(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T] (any integer dtype), inv_freq [D/2] fp32 -> cos, sin fp32 [T, 1, D]; the second half repeats the
    first.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rope_angles_fake(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (positions.shape[0], 1, 2 * inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


@triton.jit
def _rope_angles_kernel(positions, inv_freq, cos, sin, HALF: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, HALF)
    pdl_start(PDL)
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + channel)
    # The hardware's sine is only good near zero, and a position can be 10**5: take whole turns off first. 2 pi comes in
    # three parts, of which the first two have so few bits that their products with the number of turns are exact.
    # Nothing may be fused here: the angle is rounded to fp32 as the reference rounds it (half a step is 4e-3 at
    # position 131071).
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    angle = ((angle - turns * 6.28125) - turns * 0.00193023681640625) - turns * 5.0703631800e-06
    target = token * 2 * HALF + channel
    tl.store(cos + target, tl.cos(angle))
    tl.store(cos + target + HALF, tl.cos(angle))
    tl.store(sin + target, tl.sin(angle))
    tl.store(sin + target + HALF, tl.sin(angle))


def rope_angles_launch(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (cos, sin). D/2 is a power of two. Too small to heed `sm_budget`."""
    if positions.numel() == 0:
        return
    grid = (positions.shape[0],)
    _rope_angles_kernel[grid](
        positions,
        inv_freq,
        out[0],
        out[1],
        HALF=inv_freq.shape[0],
        num_warps=1,
        enable_fp_fusion=False,
        **pdl_options(pdl),
    )


rope_angles = register(
    "rope_angles", rope_angles_reference, rope_angles_fake, rope_angles_launch, kind="rope_angles", family="rope"
)
