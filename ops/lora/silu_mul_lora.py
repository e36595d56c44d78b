"""`silu_mul_lora`: SiLU(gate) * up fused with the LoRA delta of gate and up, which is never written to memory.

The product of a token's ranks and B is an integer product: `lora_round` rounds the ranks to int8, with one step for
gate and one for up. A 16-bit product would need B's int8 rows widened to bf16, which takes more instructions than the
rest of the product.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.reproducible_sums import silu_in_fp32
from ..core.triton_support import cdiv, in_fp32, next_power_of_2, pdl_options, pdl_start, require_contiguous, round_to
from ..elementwise.silu_mul import silu
from .expand_rounded import columns_of, fits, load_b, load_ranks, load_scale, load_step, load_tokens, product
from .shrink import dequantized

BLOCKS = ((128, 4, 1, 1), (1 << 30, 4, 1, 2))  # (maximum tokens, warps, steps, parts): see `block`


def reference(
    gate_up: torch.Tensor,
    ranks: torch.Tensor,
    rank_step: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
) -> torch.Tensor:
    """Return h [T, I] = silu(gate + delta of gate) * (up + delta of up) in gate_up's dtype, rounded once from fp32.

    delta[t, half i] = ranks[t, i*R:(i+1)*R] @ b[slot of t, half i]^T * rank_step[t, i] * b_scale[slot of t, half i],
    zero for tokens without an adapter.

    gate_up            [T, 2I]
    ranks, rank_step   [T, 2R] int8, [T, 2] fp32 of `lora_round`; arbitrary for tokens without an adapter
    b, b_scale         [S, 2I, R] int8, [S, 2I] fp32; includes alpha / rank
    token_order, tiles, tile   from `lora_plan`
    """
    check(gate_up, ranks, rank_step, b, b_scale)
    width, rank = gate_up.shape[1] // 2, b.shape[2]
    total = gate_up.to(torch.float32, copy=True)
    for slot, first, count in tiles.tolist():
        if slot < 0:
            continue
        tokens = token_order[first : first + count].long()
        for i in (0, 1):
            columns = slice(i * width, (i + 1) * width)
            product = ranks[tokens, i * rank : (i + 1) * rank].float() @ b[slot, columns].float().T
            total[tokens, columns] += dequantized(product, rank_step[tokens, i]) * b_scale[slot, columns]
    gate, up = total.chunk(2, dim=-1)
    return (silu_in_fp32(gate) * up).to(gate_up.dtype)


def fake(
    gate_up: torch.Tensor, ranks: torch.Tensor, rank_step: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, *_: Any
) -> torch.Tensor:
    """Return an empty result."""
    check(gate_up, ranks, rank_step, b, b_scale)
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def check(
    gate_up: torch.Tensor, ranks: torch.Tensor, rank_step: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor
) -> None:
    """Raise ValueError unless shapes and dtypes are those of `reference`."""
    if (
        gate_up.dim() != 2
        or gate_up.shape[1] % 2
        or b.dtype != torch.int8
        or b.dim() != 3
        or b.shape[1] != gate_up.shape[1]
    ):
        raise ValueError(
            f"silu_mul_lora: gate_up {tuple(gate_up.shape)} and b {b.dtype}{tuple(b.shape)}; needs [T, 2I] and "
            "torch.int8 [S, 2I, R]"
        )
    tokens = gate_up.shape[0]
    if (
        ranks.dtype != torch.int8
        or ranks.shape != (tokens, 2 * b.shape[2])
        or rank_step.dtype != torch.float32
        or rank_step.shape != (tokens, 2)
    ):
        raise ValueError(
            f"silu_mul_lora: ranks {ranks.dtype}{tuple(ranks.shape)} and rank_step "
            f"{rank_step.dtype}{tuple(rank_step.shape)}; needs torch.int8 "
            f"[{tokens}, {2 * b.shape[2]}] and torch.float32 [{tokens}, 2], as lora_round makes them of the planes "
            "of two linears"
        )
    if b_scale.shape != b.shape[:2]:
        raise ValueError(
            f"silu_mul_lora: b_scale {tuple(b_scale.shape)}; for b {tuple(b.shape)} it must be {tuple(b.shape[:2])}"
        )


@triton.jit
def _load_both(ranks, rank_step, token, slot, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr):
    """Load the ranks of gate and of up of 16 tokens, int8 [WARPS, 16, RANKS] (in every warp), and their steps.

    The steps are fp32 [WARPS * 64, 1]; zeros without an adapter.
    """
    gate_q, up_q = (
        load_ranks(ranks, token, 0, 2, RANK, RANKS, WARPS),
        load_ranks(ranks, token, 1, 2, RANK, RANKS, WARPS),
    )
    return gate_q, up_q, load_step(rank_step, token, slot, 0, 2), load_step(rank_step, token, slot, 1, 2)


@triton.jit
def _load_halves(gate_up, token, column, WIDTH: tl.constexpr):
    """Load gate and up, each [WARPS * 64, 8]."""
    source, inside = gate_up + token * (2 * WIDTH) + column, (token >= 0) & (column < WIDTH)
    return tl.load(source, mask=inside, other=0.0), tl.load(source + WIDTH, mask=inside, other=0.0)


@triton.jit
def _store(
    h, gate, up, gate_q, up_q, gate_step, up_step, gate_rows, up_rows, gate_scale, up_scale, token, slot, column,
    WIDTH: tl.constexpr, WARPS: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Store h of 16 tokens.

    Without branches the compiler would move loads of gate, up and the next 16 tokens after the products. So each
    product is in a branch, which all tokens with an adapter take. BOTH: one branch for both products, which needs more
    registers.
    """
    gate_delta, up_delta = tl.zeros([2, WARPS, 8, 32], tl.float32), tl.zeros([2, WARPS, 8, 32], tl.float32)
    if slot >= 0:
        gate_delta = product(gate_q, gate_step, gate_rows, WARPS) * gate_scale
        if BOTH:
            up_delta = product(up_q, up_step, up_rows, WARPS) * up_scale
    if not BOTH:
        up_delta = product(up_q, up_step, up_rows, WARPS) * up_scale
    gate, up = (
        in_fp32(tl.reshape(gate, (2, WARPS, 8, 32))) + gate_delta,
        in_fp32(tl.reshape(up, (2, WARPS, 8, 32))) + up_delta,
    )
    values = tl.reshape(round_to(silu(gate) * up, h.dtype.element_ty), (WARPS * 64, 8))
    tl.store(h + token * WIDTH + column, values, mask=(token >= 0) & (column < WIDTH))


@triton.jit
def silu_mul_lora_kernel(
    gate_up, ranks, rank_step, b, b_scale, token_order, tiles, h, blocks, groups, WIDTH: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute 16 * PARTS tokens of a tile and STEPS * 32 * WARPS columns of h per program; unused ones return at once.

    B's rows of a step's columns are loaded once for all its tokens. These are processed 16 at a time; loads for the
    next 16 tokens overlap with the products.
    """
    tile = tiles + tl.program_id(0) // (blocks * groups) * 3
    done = tl.program_id(0) // blocks % groups * (16 * PARTS)
    begin = tl.program_id(0) % blocks * (STEPS * 32 * WARPS)
    slot, first, count = tl.load(tile), tl.load(tile + 1) + done, tl.load(tile + 2) - done
    if count > 0:
        gate_b = b + slot.to(tl.int64) * (2 * WIDTH) * RANK
        scales = b_scale + slot.to(tl.int64) * (2 * WIDTH)
        for step in tl.static_range(STEPS):
            gate_rows = load_b(gate_b, begin, WIDTH, slot, RANK, RANKS, WARPS)
            up_rows = load_b(gate_b + WIDTH * RANK, begin, WIDTH, slot, RANK, RANKS, WARPS)
            gate_scale = load_scale(scales, begin, WIDTH, slot, WARPS)
            up_scale = load_scale(scales + WIDTH, begin, WIDTH, slot, WARPS)
            column = columns_of(begin, WARPS)
            token = load_tokens(token_order, first, count, WARPS)
            if PARTS > 1:
                next_token = load_tokens(token_order, first + 16, count - 16, WARPS)
            if step == 0:
                pdl_start(PDL)
            gate, up = _load_halves(gate_up, token, column, WIDTH)
            if PARTS > 1 or step == 0:
                gate_q, up_q, gate_step, up_step = _load_both(ranks, rank_step, token, slot, RANK, RANKS, WARPS)
            for part in tl.static_range(PARTS):
                now, gate_now, up_now = token, gate, up
                gate_q_now, up_q_now, gate_step_now, up_step_now = gate_q, up_q, gate_step, up_step
                if part + 1 < PARTS:
                    token = next_token
                    gate, up = _load_halves(gate_up, token, column, WIDTH)
                    gate_q, up_q, gate_step, up_step = _load_both(ranks, rank_step, token, slot, RANK, RANKS, WARPS)
                if part + 2 < PARTS:
                    next_token = load_tokens(token_order, first + 16 * (part + 2), count - 16 * (part + 2), WARPS)
                if count > 16 * part:
                    _store(
                        h, gate_now, up_now, gate_q_now, up_q_now, gate_step_now, up_step_now, gate_rows, up_rows,
                        gate_scale, up_scale, now, slot, column, WIDTH, WARPS, PARTS > 1,
                    )  # fmt: skip
            begin += 32 * WARPS


def block(tokens: int, tile: int, width: int) -> tuple[int, int, int]:
    """Return (warps, steps, parts) of a program, for tiles of `tile` tokens and h of `width` columns.

    A step has 32 * warps columns, a part 16 tokens.
    """
    warps, steps, parts = next(chosen for most, *chosen in BLOCKS if tokens <= most)
    warps = min(warps, next_power_of_2(cdiv(width, 32)))
    return warps, min(steps, cdiv(width, 32 * warps)), min(parts, cdiv(tile, 16))


def launch(
    gate_up: torch.Tensor,
    ranks: torch.Tensor,
    rank_step: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    token_order: torch.Tensor,
    tiles: torch.Tensor,
    tile: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (h,). With `pdl`, the previous launch in the stream must write neither the plan nor b.

    Ignores `sm_budget`. Raises ValueError if `fits` returns a reason.
    """
    check(gate_up, ranks, rank_step, b, b_scale)
    objection = fits(b.shape[2])
    if objection:
        raise ValueError(f"silu_mul_lora: {objection}; use lora_expand and silu_mul")
    require_contiguous(
        "silu_mul_lora", gate_up=gate_up, ranks=ranks, rank_step=rank_step, b=b, b_scale=b_scale,
        token_order=token_order, tiles=tiles,
    )  # fmt: skip
    tokens, width, rank = gate_up.shape[0], gate_up.shape[1] // 2, b.shape[2]
    if gate_up.numel() == 0:
        return
    warps, steps, parts = block(tokens, tile, width)
    blocks, groups = cdiv(width, 32 * warps * steps), cdiv(tile, 16 * parts)
    silu_mul_lora_kernel[tiles.shape[0] * groups * blocks,](
        gate_up, ranks, rank_step, b, b_scale, token_order, tiles, out[0], blocks, groups, WIDTH=width, RANK=rank,
        RANKS=max(32, next_power_of_2(rank)), WARPS=warps, STEPS=steps, PARTS=parts, num_warps=warps,
        **pdl_options(pdl),
    )  # fmt: skip


silu_mul_lora = register("silu_mul_lora", reference, fake, launch, kind="silu_mul", family="lora")
