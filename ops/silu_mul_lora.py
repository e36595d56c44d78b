"""SiLU(gate) * up with the LoRA delta of gate and up made by the launch that adds it: LoRA's second half writes nothing that is read again.

The product of shrunk rows and B is one of whole numbers: the sum of a token's planes is rounded to int8, with a step for each of its two halves, since widening
B's int8 rows to bf16 costs more instructions than the rest of the product.
"""
from typing import Optional

import torch
import triton
import triton.language as tl

from .lora_shrink import dequantized
from .quantize import quantize_rowwise_reference
from .registry import register
from .silu_mul import silu
from .triton_support import INTERP, cdiv, in_fp32, next_power_of_2, pdl_options, pdl_start, require_contiguous, round_to, row_scale, to_int8

MAX_RANK = 64
MAGIC_BITS = tl.constexpr(0x4B400000)  # of 1.5 * 2**23: whole numbers below 2**22 added to these bits are added to that value
MAGIC = tl.constexpr(12582912.0)


def fits(rank: int) -> Optional[str]:
    """Why the kernel doesn't take stacks of this rank; None if it does."""
    return None if 8 <= rank <= MAX_RANK and rank % 8 == 0 else f"LoRA stacks of rank {rank}; it takes multiples of 8 up to {MAX_RANK}"


def silu_mul_lora_reference(gate_up: torch.Tensor, planes: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, token_order: torch.Tensor,
                            tiles: torch.Tensor, tile: int) -> torch.Tensor:
    """h [T, I] = silu(gate + delta of gate) * (up + delta of up) in gate_up's dtype, from fp32 with one rounding; no delta for tokens without an adapter.

    delta[t, half i] = q[t] @ b[slot of t, half i]^T * step[t] * b_scale[slot of t, half i], where q (int8) and step are what `quantize_rowwise` makes of the
    sum of planes[:, t, i*R:(i+1)*R]. The kernel multiplies by 1 / step, so a value that lies on a rounding edge may land one step from the reference's.

    gate_up      [T, 2I]
    planes       [splits, T, 2R] fp32, added in order
    b, b_scale   [S, 2I, R] int8, [S, 2I] fp32; alpha / rank already folded in
    token_order, tiles, tile   of `lora_plan`
    """
    check(gate_up, planes, b, b_scale)
    width, rank = gate_up.shape[1] // 2, b.shape[2]
    shrunk = planes[0]
    for plane in planes[1:]:
        shrunk = shrunk + plane
    total = gate_up.to(torch.float32, copy=True)
    for slot, first, count in tiles.tolist():
        if slot < 0:
            continue
        tokens = token_order[first:first + count].long()
        for i in (0, 1):
            columns = slice(i * width, (i + 1) * width)
            q, step = quantize_rowwise_reference(shrunk[tokens, i * rank:(i + 1) * rank], torch.int8)
            total[tokens, columns] += dequantized(q.float() @ b[slot, columns].float().T, step) * b_scale[slot, columns]
    gate, up = total.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def silu_mul_lora_fake(gate_up: torch.Tensor, planes: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, token_order: torch.Tensor, tiles: torch.Tensor,
                       tile: int) -> torch.Tensor:
    check(gate_up, planes, b, b_scale)
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def check(gate_up: torch.Tensor, planes: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> None:
    """Raises ValueError for shapes and dtypes that are not those of `silu_mul_lora_reference`."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or b.dtype != torch.int8 or b.dim() != 3 or b.shape[1] != gate_up.shape[1]:
        raise ValueError(f"silu_mul_lora: gate_up {tuple(gate_up.shape)} and b {b.dtype}{tuple(b.shape)}; needs [T, 2I] and torch.int8 [S, 2I, R]")
    if planes.dim() != 3 or planes.shape[1:] != (gate_up.shape[0], 2 * b.shape[2]) or b_scale.shape != b.shape[:2]:
        raise ValueError(f"silu_mul_lora: planes {tuple(planes.shape)} and b_scale {tuple(b_scale.shape)}; beside gate_up {tuple(gate_up.shape)} and b "
                         f"{tuple(b.shape)} they must be [splits, {gate_up.shape[0]}, {2 * b.shape[2]}] and {tuple(b.shape[:2])}")


# Triton deals the rows of a matrix that is loaded by 8 or 16 bytes to the lanes first, then to the warps, then to the registers. The rows of the loads below
# are such that a thread loads what it holds of the product's operand or result, and nothing goes through shared memory. Of a product it has pairs of columns of
# blocks of 8, and pairs of four blocks are neighbours in memory here; of 32 ranks it has 4 in each half, and these are neighbours here.
@triton.jit
def _load_b(b, begin, slot, WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr):
    """B's rows for 32 * WARPS columns from `begin` as the product's operand, int8 [RANKS, 32 * WARPS]; zeros where there are none."""
    row = tl.arange(0, RANKS * WARPS * 4)[:, None]
    place = row // 4 % 8
    column = begin + row // 32 % WARPS * 32 + place // 2 * 8 + row // (32 * WARPS) % 4 * 2 + place % 2
    rank = row // (128 * WARPS) * 32 + row % 4 * 8 + tl.arange(0, 8)[None, :]
    rows = tl.load(b + column * RANK + rank, mask=(column < tl.where(slot >= 0, WIDTH, 0)) & (rank < RANK), other=0)
    rows = tl.permute(tl.reshape(rows, (RANKS // 32, 4, WARPS, 8, 4, 2, 4)), (0, 5, 4, 6, 1, 2, 3))
    return tl.reshape(rows, (RANKS, 32 * WARPS))


@triton.jit
def _load_scale(b_scale, begin, slot, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """The scales of these columns, [1, WARPS, 8, 32] with the same in each of the 8; zeros where there are none."""
    row = tl.arange(0, WARPS * 64)[:, None]
    column = begin + row // 32 % WARPS * 32 + row % 4 * 8 + row // (32 * WARPS) * 4 + tl.arange(0, 4)[None, :]
    scale = tl.load(b_scale + column, mask=column < tl.where(slot >= 0, WIDTH, 0), other=0.0)
    return tl.reshape(tl.permute(tl.reshape(scale, (2, WARPS, 8, 4, 4)), (1, 2, 3, 0, 4)), (1, WARPS, 8, 32))


@triton.jit
def _place(token_order, begin, first, count, WARPS: tl.constexpr):
    """16 tokens (int64, -1 past the last one) [WARPS * 64, 1] and 32 * WARPS columns [WARPS * 64, 8], where gate, up and h lie."""
    row = tl.arange(0, WARPS * 64)[:, None]
    lane = row // (32 * WARPS) * 8 + row // 4 % 8
    token = tl.load(token_order + first + lane, mask=lane < count, other=-1).to(tl.int64)
    return token, begin + row // 32 % WARPS * 32 + row % 4 * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _shrunk(planes, token, active, half, num_tokens, SPLITS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """The summed planes of 16 tokens as the product's other operand: (int8 [16, RANKS], steps [2, 1, 8, 1]); zeros for tokens from `active` on."""
    rank = tl.arange(0, RANKS)
    source = planes + token[:, None] * (2 * RANK) + half * RANK + rank[None, :]
    wanted = (tl.arange(0, 16) < active)[:, None] & (rank < RANK)[None, :]
    total = tl.zeros([16, RANKS], tl.float32)
    for plane in tl.static_range(SPLITS):
        total += tl.load(source + plane * num_tokens * (2 * RANK), mask=wanted, other=0.0)
    step = row_scale(tl.max(tl.abs(total), axis=1), tl.int8)
    q = tl.permute(tl.reshape(to_int8(total * (1.0 / step)[:, None]), (16, RANKS // 32, 4, 2, 4)), (0, 1, 3, 2, 4))
    step = (step.to(tl.int32, bitcast=True) & -4).to(tl.float32, bitcast=True)  # 22 bits: its product with MAGIC is exact
    return tl.reshape(q, (16, RANKS)), tl.reshape(step, (2, 1, 8, 1))


@triton.jit
def _product(q, step, rows, WARPS: tl.constexpr):
    """q @ rows times the tokens' steps, fp32 [2, WARPS, 8, 32]."""
    total = tl.dot(q, rows, tl.full([16, 32 * WARPS], MAGIC_BITS, tl.int32), out_dtype=tl.int32)
    total = tl.permute(tl.reshape(total, (2, 8, 4, WARPS, 4, 2)), (0, 3, 1, 4, 2, 5))
    total = tl.reshape(total, (2, WARPS, 8, 32)).to(tl.float32, bitcast=True)  # converting whole numbers takes four times as long as this sum
    if INTERP:  # its multiply-add rounds twice
        return (total - MAGIC) * step
    else:
        return tl.fma(total, tl.broadcast_to(step, total.shape), tl.broadcast_to(step * -MAGIC, total.shape))


@triton.jit
def _delta(q, step, b, b_scale, begin, slot, WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr):
    """What is added to gate or up [2, WARPS, 8, 32] in columns from `begin`."""
    return _product(q, step, _load_b(b, begin, slot, WIDTH, RANK, RANKS, WARPS), WARPS) * _load_scale(b_scale, begin, slot, WIDTH, WARPS)


@triton.jit
def _load_halves(gate_up, token, column, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """gate and up, each [2, WARPS, 8, 32]."""
    source, inside = gate_up + token * (2 * WIDTH) + column, (token >= 0) & (column < WIDTH)
    gate, up = tl.load(source, mask=inside, other=0.0), tl.load(source + WIDTH, mask=inside, other=0.0)
    return tl.reshape(gate, (2, WARPS, 8, 32)), tl.reshape(up, (2, WARPS, 8, 32))


@triton.jit
def _store(h, gate, up, token, column, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    values = tl.reshape(round_to(silu(gate) * up, h.dtype.element_ty), (WARPS * 64, 8))
    tl.store(h + token * WIDTH + column, values, mask=(token >= 0) & (column < WIDTH))


@triton.jit
def silu_mul_lora_kernel(gate_up, planes, b, b_scale, token_order, tiles, h, num_tokens, blocks, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
                         PARTS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr):
    """A program for each (tile, 16 of its tokens, block of STEPS * 32 * WARPS columns of h); those of unused tiles and tokens end at once.

    The planes of 16 tokens are as many bytes as gate and up of 128 of their columns and more, so their sum serves several steps.
    """
    tile = tiles + tl.program_id(0) // (blocks * PARTS) * 3
    done = tl.program_id(0) // blocks % PARTS * 16
    begin = tl.program_id(0) % blocks * (STEPS * 32 * WARPS)
    slot, first, count = tl.load(tile), tl.load(tile + 1) + done, tl.load(tile + 2) - done
    if count > 0:
        gate_b = b + slot.to(tl.int64) * (2 * WIDTH) * RANK
        up_b = gate_b + WIDTH * RANK
        scales = b_scale + slot.to(tl.int64) * (2 * WIDTH)
        gate_rows = _load_b(gate_b, begin, slot, WIDTH, RANK, RANKS, WARPS)
        up_rows = _load_b(up_b, begin, slot, WIDTH, RANK, RANKS, WARPS)
        gate_scale = _load_scale(scales, begin, slot, WIDTH, WARPS)
        up_scale = _load_scale(scales + WIDTH, begin, slot, WIDTH, WARPS)
        lane = tl.arange(0, 16)
        tokens = tl.load(token_order + first + lane, mask=lane < count, other=0)
        token, column = _place(token_order, begin, first, count, WARPS)
        pdl_start(PDL)
        gate, up = _load_halves(gate_up, token, column, WIDTH, WARPS)
        active = tl.where(slot >= 0, count, 0)
        gate_q, gate_step = _shrunk(planes, tokens, active, 0, num_tokens, SPLITS, RANK, RANKS)
        up_q, up_step = _shrunk(planes, tokens, active, 1, num_tokens, SPLITS, RANK, RANKS)
        gate = in_fp32(gate) + _product(gate_q, gate_step, gate_rows, WARPS) * gate_scale
        up = in_fp32(up) + _product(up_q, up_step, up_rows, WARPS) * up_scale
        _store(h, gate, up, token, column, WIDTH, WARPS)
        for _ in tl.static_range(1, STEPS):
            begin += 32 * WARPS
            column += 32 * WARPS
            gate, up = _load_halves(gate_up, token, column, WIDTH, WARPS)
            gate = in_fp32(gate) + _delta(gate_q, gate_step, gate_b, scales, begin, slot, WIDTH, RANK, RANKS, WARPS)
            up = in_fp32(up) + _delta(up_q, up_step, up_b, scales + WIDTH, begin, slot, WIDTH, RANK, RANKS, WARPS)
            _store(h, gate, up, token, column, WIDTH, WARPS)


def block(width: int) -> tuple[int, int]:
    """(warps, steps) of a program for h of `width` columns: the fastest at 64, 128 and 256 tokens of an 8B model on an H200."""
    warps = min(4, next_power_of_2(cdiv(width, 32)))
    return warps, min(2, cdiv(width, 32 * warps))


def silu_mul_lora_launch(gate_up: torch.Tensor, planes: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, token_order: torch.Tensor, tiles: torch.Tensor,
                         tile: int, *, out: tuple[torch.Tensor, ...], sm_budget: Optional[int] = None, pdl: bool = False) -> None:
    """Fill `out` = (h,). With `pdl`, the launch before it in the stream is taken to be neither the plan's nor the one that wrote b. Does not heed `sm_budget`.

    Raises ValueError where `fits` objects.
    """
    check(gate_up, planes, b, b_scale)
    objection = fits(b.shape[2])
    if objection:
        raise ValueError(f"silu_mul_lora: {objection}; lora_expand and silu_mul do")
    require_contiguous("silu_mul_lora", gate_up=gate_up, planes=planes, b=b, b_scale=b_scale, token_order=token_order, tiles=tiles)
    tokens, width, rank = gate_up.shape[0], gate_up.shape[1] // 2, b.shape[2]
    if gate_up.numel() == 0:
        return
    warps, steps = block(width)
    blocks = cdiv(width, 32 * warps * steps)
    silu_mul_lora_kernel[(tiles.shape[0] * cdiv(tile, 16) * blocks,)](
        gate_up, planes, b, b_scale, token_order, tiles, out[0], tokens, blocks, WIDTH=width, SPLITS=planes.shape[0], PARTS=cdiv(tile, 16),
        RANK=rank, RANKS=max(32, next_power_of_2(rank)), WARPS=warps, STEPS=steps, num_warps=warps, **pdl_options(pdl))


silu_mul_lora = register("silu_mul_lora", silu_mul_lora_reference, silu_mul_lora_fake, silu_mul_lora_launch)
