"""SiLU(gate) * up with the LoRA delta of gate and up made by the launch that adds it: LoRA's second half writes nothing that is read again.

The product of a token's ranks and B is one of whole numbers: `lora_round` has rounded the ranks to int8, with a step for each of the two halves, since widening
B's int8 rows to bf16 costs more instructions than the rest of the product.
"""
from typing import Optional

import torch
import triton
import triton.language as tl

from .lora_shrink import dequantized
from .registry import register
from .silu_mul import silu
from .triton_support import INTERP, cdiv, in_fp32, next_power_of_2, pdl_options, pdl_start, require_contiguous, round_to

MAX_RANK = 64
MAGIC_BITS = tl.constexpr(0x4B400000)  # of 1.5 * 2**23: whole numbers below 2**22 added to these bits are added to that value
MAGIC = tl.constexpr(12582912.0)
BLOCKS = ((128, 4, 1, 1), (1 << 30, 4, 1, 2))  # (most tokens, warps, steps, parts): see `block`


def fits(rank: int) -> Optional[str]:
    """Why the kernel doesn't take stacks of this rank; None if it does."""
    return None if 8 <= rank <= MAX_RANK and rank % 8 == 0 else f"LoRA stacks of rank {rank}; it takes multiples of 8 up to {MAX_RANK}"


def silu_mul_lora_reference(gate_up: torch.Tensor, ranks: torch.Tensor, rank_step: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor,
                            token_order: torch.Tensor, tiles: torch.Tensor, tile: int) -> torch.Tensor:
    """h [T, I] = silu(gate + delta of gate) * (up + delta of up) in gate_up's dtype, from fp32 with one rounding; no delta for tokens without an adapter.

    delta[t, half i] = ranks[t, i*R:(i+1)*R] @ b[slot of t, half i]^T * rank_step[t, i] * b_scale[slot of t, half i]

    gate_up            [T, 2I]
    ranks, rank_step   [T, 2R] int8, [T, 2] fp32: `lora_round`'s; those of tokens without an adapter may hold anything
    b, b_scale         [S, 2I, R] int8, [S, 2I] fp32; alpha / rank already folded in
    token_order, tiles, tile   of `lora_plan`
    """
    check(gate_up, ranks, rank_step, b, b_scale)
    width, rank = gate_up.shape[1] // 2, b.shape[2]
    total = gate_up.to(torch.float32, copy=True)
    for slot, first, count in tiles.tolist():
        if slot < 0:
            continue
        tokens = token_order[first:first + count].long()
        for i in (0, 1):
            columns = slice(i * width, (i + 1) * width)
            product = ranks[tokens, i * rank:(i + 1) * rank].float() @ b[slot, columns].float().T
            total[tokens, columns] += dequantized(product, rank_step[tokens, i]) * b_scale[slot, columns]
    gate, up = total.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def silu_mul_lora_fake(gate_up: torch.Tensor, ranks: torch.Tensor, rank_step: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, token_order: torch.Tensor,
                       tiles: torch.Tensor, tile: int) -> torch.Tensor:
    check(gate_up, ranks, rank_step, b, b_scale)
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def check(gate_up: torch.Tensor, ranks: torch.Tensor, rank_step: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> None:
    """Raises ValueError for shapes and dtypes that are not those of `silu_mul_lora_reference`."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or b.dtype != torch.int8 or b.dim() != 3 or b.shape[1] != gate_up.shape[1]:
        raise ValueError(f"silu_mul_lora: gate_up {tuple(gate_up.shape)} and b {b.dtype}{tuple(b.shape)}; needs [T, 2I] and torch.int8 [S, 2I, R]")
    tokens = gate_up.shape[0]
    if ranks.dtype != torch.int8 or ranks.shape != (tokens, 2 * b.shape[2]) or rank_step.dtype != torch.float32 or rank_step.shape != (tokens, 2):
        raise ValueError(f"silu_mul_lora: ranks {ranks.dtype}{tuple(ranks.shape)} and rank_step {rank_step.dtype}{tuple(rank_step.shape)}; needs torch.int8 "
                         f"[{tokens}, {2 * b.shape[2]}] and torch.float32 [{tokens}, 2], as lora_round makes them of the planes of two linears")
    if b_scale.shape != b.shape[:2]:
        raise ValueError(f"silu_mul_lora: b_scale {tuple(b_scale.shape)}; for b {tuple(b.shape)} it must be {tuple(b.shape[:2])}")


# Triton deals the rows of a matrix that is loaded by 8 or 16 bytes to the lanes first, then to the warps, then to the registers. The rows of the loads below
# are such that a thread loads what it holds of the product's operands or result, and nothing goes through shared memory. A warp has a product of its own, of
# 16 tokens and 32 columns: of these a thread has pairs of columns of blocks of 8, and pairs of four blocks are neighbours in memory here; of 32 ranks it has 4
# in each half, and these are neighbours here.
@triton.jit
def _load_b(b, begin, slot, WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr):
    """B's rows for 32 * WARPS columns from `begin` as the products' operand, int8 [WARPS, RANKS, 32]; zeros where there are none."""
    row = tl.arange(0, RANKS * WARPS * 4)[:, None]
    place = row // 4 % 8
    column = begin + row // 32 % WARPS * 32 + place // 2 * 8 + row // (32 * WARPS) % 4 * 2 + place % 2
    rank = row // (128 * WARPS) * 32 + row % 4 * 8 + tl.arange(0, 8)[None, :]
    rows = tl.load(b + column * RANK + rank, mask=(column < tl.where(slot >= 0, WIDTH, 0)) & (rank < RANK), other=0)
    rows = tl.permute(tl.reshape(rows, (RANKS // 32, 4, WARPS, 8, 4, 2, 4)), (2, 0, 5, 4, 6, 1, 3))
    return tl.reshape(rows, (WARPS, RANKS, 32))


@triton.jit
def _load_scale(b_scale, begin, slot, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """The scales of these columns, [1, WARPS, 8, 32] with the same in each of the 8; zeros where there are none."""
    row = tl.arange(0, WARPS * 64)[:, None]
    column = begin + row // 32 % WARPS * 32 + row % 4 * 8 + row // (32 * WARPS) * 4 + tl.arange(0, 4)[None, :]
    scale = tl.load(b_scale + column, mask=column < tl.where(slot >= 0, WIDTH, 0), other=0.0)
    return tl.reshape(tl.permute(tl.reshape(scale, (2, WARPS, 8, 4, 4)), (1, 2, 3, 0, 4)), (1, WARPS, 8, 32))


@triton.jit
def _tokens(token_order, first, count, WARPS: tl.constexpr):
    """16 tokens, each where its gate, up, h and ranks lie: int64 [WARPS * 64, 1], -1 past the last one."""
    row = tl.arange(0, WARPS * 64)[:, None]
    lane = row // (32 * WARPS) * 8 + row // 4 % 8
    return tl.load(token_order + first + lane, mask=lane < count, other=-1).to(tl.int64)


@triton.jit
def _columns(begin, WARPS: tl.constexpr):
    """32 * WARPS columns beside them, [WARPS * 64, 8]."""
    row = tl.arange(0, WARPS * 64)[:, None]
    return begin + row // 32 % WARPS * 32 + row % 4 * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _load_half_ranks(ranks, token, half, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr):
    row = tl.arange(0, RANKS * WARPS * 2)[:, None]
    rank = row // (64 * WARPS) * 32 + row % 4 * 8 + tl.arange(0, 8)[None, :]
    token = tl.reshape(tl.broadcast_to(token[None, :, :], (RANKS // 32, WARPS * 64, 1)), (RANKS * WARPS * 2, 1))
    values = tl.load(ranks + token * (2 * RANK) + half * RANK + rank, mask=(token >= 0) & (rank < RANK), other=0)
    values = tl.permute(tl.reshape(values, (RANKS // 32, 2, WARPS, 8, 4, 2, 4)), (2, 1, 3, 0, 5, 4, 6))
    return tl.reshape(values, (WARPS, 16, RANKS))


@triton.jit
def _load_step(rank_step, token, slot, half):
    step = tl.load(rank_step + token * 2 + half, mask=tl.where(slot >= 0, token, -1) >= 0, other=0.0)
    return (step.to(tl.int32, bitcast=True) & -4).to(tl.float32, bitcast=True)  # 22 bits: its product with MAGIC is exact


@triton.jit
def _load_ranks(ranks, rank_step, token, slot, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr):
    """Of 16 tokens the ranks of gate and of up as the products' other operand, int8 [WARPS, 16, RANKS] (every warp loads all of them), and their steps.

    The steps are fp32 [WARPS * 64, 1]; zeros where there is no adapter.
    """
    gate_q, up_q = _load_half_ranks(ranks, token, 0, RANK, RANKS, WARPS), _load_half_ranks(ranks, token, 1, RANK, RANKS, WARPS)
    return gate_q, up_q, _load_step(rank_step, token, slot, 0), _load_step(rank_step, token, slot, 1)


@triton.jit
def _product(q, step, rows, WARPS: tl.constexpr):
    """q @ rows times the tokens' steps, fp32 [2, WARPS, 8, 32]."""
    total = tl.dot(q, rows, tl.full([WARPS, 16, 32], MAGIC_BITS, tl.int32), out_dtype=tl.int32)
    total = tl.permute(tl.reshape(total, (WARPS, 2, 8, 4, 4, 2)), (1, 0, 2, 4, 3, 5))
    total = tl.reshape(total, (2, WARPS, 8, 32)).to(tl.float32, bitcast=True)  # converting whole numbers takes four times as long as this sum
    step = tl.reshape(tl.broadcast_to(step, (WARPS * 64, 8)), (2, WARPS, 8, 32))
    if INTERP:  # its multiply-add rounds twice
        return (total - MAGIC) * step
    else:
        return tl.fma(total, step, step * -MAGIC)


@triton.jit
def _load_halves(gate_up, token, column, WIDTH: tl.constexpr):
    """gate and up, each [WARPS * 64, 8]."""
    source, inside = gate_up + token * (2 * WIDTH) + column, (token >= 0) & (column < WIDTH)
    return tl.load(source, mask=inside, other=0.0), tl.load(source + WIDTH, mask=inside, other=0.0)


@triton.jit
def _store(h, gate, up, gate_q, up_q, gate_step, up_step, gate_rows, up_rows, gate_scale, up_scale, token, slot, column, WIDTH: tl.constexpr,
           WARPS: tl.constexpr, BOTH: tl.constexpr):
    """h of 16 tokens. In one block of code the loads of gate, up and what the next 16 tokens need would be put off until the products are done.

    So a product is behind a branch that is always taken for tokens with an adapter. BOTH: both are, for which they need more registers.
    """
    gate_delta, up_delta = tl.zeros([2, WARPS, 8, 32], tl.float32), tl.zeros([2, WARPS, 8, 32], tl.float32)
    if slot >= 0:
        gate_delta = _product(gate_q, gate_step, gate_rows, WARPS) * gate_scale
        if BOTH:
            up_delta = _product(up_q, up_step, up_rows, WARPS) * up_scale
    if not BOTH:
        up_delta = _product(up_q, up_step, up_rows, WARPS) * up_scale
    gate, up = in_fp32(tl.reshape(gate, (2, WARPS, 8, 32))) + gate_delta, in_fp32(tl.reshape(up, (2, WARPS, 8, 32))) + up_delta
    values = tl.reshape(round_to(silu(gate) * up, h.dtype.element_ty), (WARPS * 64, 8))
    tl.store(h + token * WIDTH + column, values, mask=(token >= 0) & (column < WIDTH))


@triton.jit
def silu_mul_lora_kernel(gate_up, ranks, rank_step, b, b_scale, token_order, tiles, h, blocks, groups, WIDTH: tl.constexpr, RANK: tl.constexpr,
                         RANKS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    """A program for each (tile, 16 * PARTS of its tokens, STEPS * 32 * WARPS columns of h); those of unused tiles and tokens end at once.

    B's rows of a step's columns serve all its tokens, 16 at a time; what the next 16 need is under way meanwhile.
    """
    tile = tiles + tl.program_id(0) // (blocks * groups) * 3
    done = tl.program_id(0) // blocks % groups * (16 * PARTS)
    begin = tl.program_id(0) % blocks * (STEPS * 32 * WARPS)
    slot, first, count = tl.load(tile), tl.load(tile + 1) + done, tl.load(tile + 2) - done
    if count > 0:
        gate_b = b + slot.to(tl.int64) * (2 * WIDTH) * RANK
        scales = b_scale + slot.to(tl.int64) * (2 * WIDTH)
        for step in tl.static_range(STEPS):
            gate_rows = _load_b(gate_b, begin, slot, WIDTH, RANK, RANKS, WARPS)
            up_rows = _load_b(gate_b + WIDTH * RANK, begin, slot, WIDTH, RANK, RANKS, WARPS)
            gate_scale = _load_scale(scales, begin, slot, WIDTH, WARPS)
            up_scale = _load_scale(scales + WIDTH, begin, slot, WIDTH, WARPS)
            column = _columns(begin, WARPS)
            token = _tokens(token_order, first, count, WARPS)
            if PARTS > 1:
                next_token = _tokens(token_order, first + 16, count - 16, WARPS)
            if step == 0:
                pdl_start(PDL)
            gate, up = _load_halves(gate_up, token, column, WIDTH)
            if PARTS > 1 or step == 0:
                gate_q, up_q, gate_step, up_step = _load_ranks(ranks, rank_step, token, slot, RANK, RANKS, WARPS)
            for part in tl.static_range(PARTS):
                now, gate_now, up_now = token, gate, up
                gate_q_now, up_q_now, gate_step_now, up_step_now = gate_q, up_q, gate_step, up_step
                if part + 1 < PARTS:
                    token = next_token
                    gate, up = _load_halves(gate_up, token, column, WIDTH)
                    gate_q, up_q, gate_step, up_step = _load_ranks(ranks, rank_step, token, slot, RANK, RANKS, WARPS)
                if part + 2 < PARTS:
                    next_token = _tokens(token_order, first + 16 * (part + 2), count - 16 * (part + 2), WARPS)
                if count > 16 * part:
                    _store(h, gate_now, up_now, gate_q_now, up_q_now, gate_step_now, up_step_now, gate_rows, up_rows, gate_scale, up_scale, now, slot,
                           column, WIDTH, WARPS, PARTS > 1)
            begin += 32 * WARPS


def block(tokens: int, tile: int, width: int) -> tuple[int, int, int]:
    """(warps, steps, parts) of a program for `tokens` tokens in tiles of `tile` and h of `width` columns: 32 * warps columns a step, 16 tokens a part."""
    warps, steps, parts = next(chosen for most, *chosen in BLOCKS if tokens <= most)
    warps = min(warps, next_power_of_2(cdiv(width, 32)))
    return warps, min(steps, cdiv(width, 32 * warps)), min(parts, cdiv(tile, 16))


def silu_mul_lora_launch(gate_up: torch.Tensor, ranks: torch.Tensor, rank_step: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor,
                         token_order: torch.Tensor, tiles: torch.Tensor, tile: int, *, out: tuple[torch.Tensor, ...], sm_budget: Optional[int] = None,
                         pdl: bool = False) -> None:
    """Fill `out` = (h,). With `pdl`, the launch before it in the stream is taken to be neither the plan's nor the one that wrote b. Does not heed `sm_budget`.

    Raises ValueError where `fits` objects.
    """
    check(gate_up, ranks, rank_step, b, b_scale)
    objection = fits(b.shape[2])
    if objection:
        raise ValueError(f"silu_mul_lora: {objection}; lora_expand and silu_mul do")
    require_contiguous("silu_mul_lora", gate_up=gate_up, ranks=ranks, rank_step=rank_step, b=b, b_scale=b_scale, token_order=token_order, tiles=tiles)
    tokens, width, rank = gate_up.shape[0], gate_up.shape[1] // 2, b.shape[2]
    if gate_up.numel() == 0:
        return
    warps, steps, parts = block(tokens, tile, width)
    blocks, groups = cdiv(width, 32 * warps * steps), cdiv(tile, 16 * parts)
    silu_mul_lora_kernel[(tiles.shape[0] * groups * blocks,)](
        gate_up, ranks, rank_step, b, b_scale, token_order, tiles, out[0], blocks, groups, WIDTH=width, RANK=rank, RANKS=max(32, next_power_of_2(rank)),
        WARPS=warps, STEPS=steps, PARTS=parts, num_warps=warps, **pdl_options(pdl))


silu_mul_lora = register("silu_mul_lora", silu_mul_lora_reference, silu_mul_lora_fake, silu_mul_lora_launch)
