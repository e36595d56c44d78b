"""`rope`: rotary position embedding (HF's rotate-half convention); `rope_angles`: cos and sin once per step.

For x = [x1 | x2] split in halves: out = [x1 * cos - x2 * sin | x2 * cos + x1 * sin], in fp32, rounded once. cos and
sin have D channels; the second half repeats the first, as in HF.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import cdiv, next_power_of_2, pdl_options, pdl_start, round_to


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] rotated by cos and sin, in x's dtype.

    cos and sin are fp32 or of the model's dtype, and broadcastable to x, such as [T, 1, D].
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x.float() * cos.float() + rotated * sin.float()).to(x.dtype)


def rope_fake(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return an empty result."""
    return x.new_empty(x.shape)


@triton.jit
def rotate_halves(first, second, cos, sin, GROUP: tl.constexpr, D: tl.constexpr):
    """Apply RoPE to [GROUP, D/2] halves in fp32; cos and sin point at the token's D angles.

    Each head loads the angles again: L1 hits are cheaper than a broadcast through shared memory.
    """
    channel = tl.zeros((GROUP, 1), tl.int32) + tl.arange(0, D // 2)[None, :]
    cos_first = tl.load(cos + channel).to(tl.float32)
    cos_second = tl.load(cos + D // 2 + channel).to(tl.float32)
    sin_first = tl.load(sin + channel).to(tl.float32)
    sin_second = tl.load(sin + D // 2 + channel).to(tl.float32)
    return first * cos_first - second * sin_first, second * cos_second + first * sin_second


@triton.jit
def _rope_kernel(
    x, cos, sin, out, x_token, x_head, cos_token, sin_token, HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    present = (head < HEADS)[:, None]
    channel = tl.arange(0, D // 2)[None, :]
    pdl_start(PDL)
    source = x + token * x_token + head[:, None] * x_head + channel
    first = tl.load(source, mask=present, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2, mask=present, other=0.0).to(tl.float32)
    first, second = rotate_halves(first, second, cos + token * cos_token, sin + token * sin_token, GROUP, D)
    target = out + (token * HEADS + head[:, None]) * D + channel
    tl.store(target, round_to(first, out.dtype.element_ty), mask=present)
    tl.store(target + D // 2, round_to(second, out.dtype.element_ty), mask=present)


def rope_launch(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (rotated,). Ignores `sm_budget`: the launch is small.

    The kernel supports x [T, heads, D] (any strides over T and heads) with cos and sin [T, 1, D], D a power of two;
    torch computes other shapes.
    """
    if x.numel() == 0:
        return
    if not _kernel_fits(x, cos, sin):
        out[0].copy_(rope_reference(x, cos, sin))
        return
    tokens, heads, width = x.shape
    group = min(next_power_of_2(heads), 8)
    _rope_kernel[(tokens, cdiv(heads, group))](
        x, cos, sin, out[0], x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), HEADS=heads, D=width, GROUP=group,
        num_warps=1, **pdl_options(pdl),
    )  # fmt: skip


def _kernel_fits(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    if x.dim() != 3 or x.shape[-1] < 4 or x.shape[-1] != next_power_of_2(x.shape[-1]):
        return False
    angles = (x.shape[0], 1, x.shape[2])
    return cos.shape == angles and sin.shape == angles and x.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1


rope = register("rope", rope_reference, rope_fake, rope_launch, family="rope")


def rope_angles_reference(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, fp32 [T, 1, D] with two equal halves, of positions [T] (integers), inv_freq [D/2] fp32."""
    angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rope_angles_fake(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    shape = (positions.shape[0], 1, 2 * inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


@triton.jit
def _rope_angles_kernel(positions, inv_freq, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    there = channel < HALF
    pdl_start(PDL)
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + channel, mask=there, other=0.0)
    # The hardware's sine is precise only near zero, and a position can be 10**5: subtract full rotations first. 2 pi is
    # split in three parts; the first two have so few bits that their products with the number of rotations are exact.
    # No FMA is allowed here: the angle is rounded to fp32 as in the reference (half a step is 4e-3 at position 131071).
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    angle = ((angle - turns * 6.28125) - turns * 0.00193023681640625) - turns * 5.0703631800e-06
    target = token * 2 * HALF + channel
    tl.store(cos + target, tl.cos(angle), mask=there)
    tl.store(cos + target + HALF, tl.cos(angle), mask=there)
    tl.store(sin + target, tl.sin(angle), mask=there)
    tl.store(sin + target + HALF, tl.sin(angle), mask=there)


def rope_angles_launch(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (cos, sin). Ignores `sm_budget`: the launch is small."""
    if positions.numel() == 0:
        return
    grid = (positions.shape[0],)
    _rope_angles_kernel[grid](
        positions, inv_freq, out[0], out[1], HALF=inv_freq.shape[0], BLOCK=next_power_of_2(inv_freq.shape[0]),
        num_warps=1, enable_fp_fusion=False, **pdl_options(pdl),
    )  # fmt: skip


rope_angles = register(
    "rope_angles", rope_angles_reference, rope_angles_fake, rope_angles_launch, kind="rope_angles", family="rope"
)
