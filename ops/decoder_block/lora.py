"""`decoder_block_lora`: a `decoder_block` launch with the LoRA branches of its linears inside.

Adapters are stacks of the weights' dtype, e4m3 or int8, with a scale a row; the activations that they meet are the
base's own, quantized per token and 128 columns (in int8 rotated where the base's are, and so must be the rows of A),
and between A and B the ranks' activations have eight bits again, one scale a token and linear. In the kernel
(`decoder_block_lora_gluon.py`) four CTAs beside the base's shrink, tiles expand.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Optional

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.device import multiprocessors
from ..core.registry import register
from ..core.triton_support import INTERPRETED
from ..core.workspace import workspace
from ..linear.linear_8bit import matmul_fp32
from ..rows.quantize import NORM_ROTATES, SILU_ROTATES, quantize_rowwise_reference
from ..rows.quantize_blocks import dequantize_blocks, padded_scales
from . import decoder_block as base
from .decoder_block import BLOCK, CONFIGS, SPLIT, BlockConfig
from .lora_groups import MAX_TOKENS, POSITIONS, lora_groups, tile_tokens
from .lora_kernel import decoder_block_lora_kernel

RANKS = (32, 64)
PACKED = (1, 2, 1, 3)  # linears that share an input: o, gate/up, down, q/k/v
CONFIG = {  # padded tokens -> slots of the ring that the base's configuration keeps beside the ranks' activations
    16: replace(CONFIGS[16], slots=12),
    32: replace(CONFIGS[32], slots=11, registers=224),
    64: replace(CONFIGS[64], slots=8, registers=168),
}


def fits(
    tokens: int,
    attention_width: int,
    hidden: int,
    intermediate: int,
    qkv_widths: Sequence[int],
    rank: int,
    sm_count: int,
) -> str | None:
    """None when the kernel takes these sizes on a GPU of `sm_count` SMs, else the reason why not (`qkv_widths`
    empty: no projection behind the block).
    """
    objection = base.fits(tokens, attention_width, hidden, intermediate, sum(qkv_widths), sm_count)
    if objection is not None:
        return objection
    if rank not in RANKS:
        return f"LoRA stacks of rank {rank}; it takes {' or '.join(map(str, RANKS))}"
    if hidden % (BLOCK * SPLIT):
        return f"hidden size {hidden} is no multiple of {BLOCK * SPLIT}"
    if any(width % BLOCK for width in qkv_widths):
        return f"q, k and v widths {tuple(qkv_widths)} are no multiples of {BLOCK}"
    if (needed := hidden // BLOCK * SPLIT + SPLIT) > sm_count:
        return f"{needed} CTAs must be resident at once, the GPU has {sm_count} SMs"
    return None


def reference(
    attention: torch.Tensor,
    attention_scale: torch.Tensor,
    residual: torch.Tensor,
    o_weight: torch.Tensor,
    o_scale: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    next_norm_weight: torch.Tensor,
    qkv_weight: Optional[torch.Tensor],
    qkv_scale: Optional[torch.Tensor],
    o_lora: Sequence[torch.Tensor],
    gate_up_lora: Sequence[torch.Tensor],
    down_lora: Sequence[torch.Tensor],
    qkv_lora: Sequence[torch.Tensor],
    groups: torch.Tensor,
    qkv_slices: Sequence[int],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`decoder_block` with LoRA: weights, activations and results as there.

    *_lora      empty, or (a [S, n*R, K], a_scale [S, n*R] fp32, b [S, N, R], b_scale [S, N] fp32) with n = 1, 2 (gate,
                up), 1, 3 (q, k, v); a and b have the weights' dtype
    groups      the result of `lora_groups` for the tokens' adapters
    qkv_slices  widths of q, k and v

    s = x a^T, x the linear's quantized activation (behind a norm without 1 / rms, as the base has it), is rounded to
    that dtype with one scale a token and linear; the delta s b^T joins the base's product in fp32, before the residual,
    SiLU or 1 / rms.
    """
    tokens = residual.shape[0]
    chosen = groups[0, groups[POSITIONS, :tokens].clamp_min(0).long()].long()
    chosen = torch.where(groups[POSITIONS, :tokens] >= 0, chosen, -1)

    def project(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, lora: Sequence[torch.Tensor], slices: Sequence[int]
    ) -> torch.Tensor:
        return matmul_fp32(x, weight) * scale + _delta(x, lora, chosen, slices)

    width = down_weight.shape[1]
    hidden = base._add(
        residual,
        project(dequantize_blocks(attention, attention_scale), o_weight, o_scale, o_lora, (residual.shape[1],)),
    )
    normed = base._quantized(hidden.float() * norm_weight.float(), attention.dtype, NORM_ROTATES)
    gate, up = (
        project(normed, gate_up_weight, gate_up_scale, gate_up_lora, (width, width)) * base._inverse_rms(hidden, eps)
    ).chunk(2, dim=-1)
    active = base._quantized(torch.nn.functional.silu(gate) * up, attention.dtype, SILU_ROTATES)
    new_residual = base._add(hidden, project(active, down_weight, down_scale, down_lora, (residual.shape[1],)))
    if qkv_weight is None or qkv_scale is None:
        return residual.new_empty(tokens, 0), new_residual
    normed = base._quantized(new_residual.float() * next_norm_weight.float(), attention.dtype, NORM_ROTATES)
    return (project(normed, qkv_weight, qkv_scale, qkv_lora, qkv_slices) * base._inverse_rms(new_residual, eps)).to(
        residual.dtype
    ), new_residual


def _delta(x: torch.Tensor, lora: Sequence[torch.Tensor], chosen: torch.Tensor, slices: Sequence[int]) -> torch.Tensor:
    """fp32 [T, N] from x [T, K] fp32; `chosen` [T] slots, -1 = none."""
    delta = torch.zeros(x.shape[0], sum(slices), device=x.device)
    if not lora:
        return delta
    a, a_scale, b, b_scale = lora
    ranks = b.shape[2]
    for slot in sorted({int(slot) for slot in chosen.tolist()} - {-1}):
        rows = (chosen == slot).nonzero().squeeze(1)
        shrunk = matmul_fp32(x[rows], a[slot]) * a_scale[slot]
        first = 0
        for i, width in enumerate(slices):
            rounded, step = quantize_rowwise_reference(shrunk[:, i * ranks : (i + 1) * ranks], b.dtype)
            product = rounded.float() @ b[slot, first : first + width].float().T
            delta[rows, first : first + width] = product * step[:, None] * b_scale[slot, first : first + width]
            first += width
    return delta


def fake(
    attention: torch.Tensor,
    attention_scale: torch.Tensor,
    residual: torch.Tensor,
    o_weight: torch.Tensor,
    o_scale: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    next_norm_weight: torch.Tensor,
    qkv_weight: Optional[torch.Tensor],
    qkv_scale: Optional[torch.Tensor],
    o_lora: Sequence[torch.Tensor],
    gate_up_lora: Sequence[torch.Tensor],
    down_lora: Sequence[torch.Tensor],
    qkv_lora: Sequence[torch.Tensor],
    groups: torch.Tensor,
    qkv_slices: Sequence[int],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return residual.new_empty(
        (residual.shape[0], 0 if qkv_weight is None else qkv_weight.shape[0])
    ), residual.new_empty(residual.shape)


def launch(
    attention: torch.Tensor,
    attention_scale: torch.Tensor,
    residual: torch.Tensor,
    o_weight: torch.Tensor,
    o_scale: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    next_norm_weight: torch.Tensor,
    qkv_weight: Optional[torch.Tensor],
    qkv_scale: Optional[torch.Tensor],
    o_lora: Sequence[torch.Tensor],
    gate_up_lora: Sequence[torch.Tensor],
    down_lora: Sequence[torch.Tensor],
    qkv_lora: Sequence[torch.Tensor],
    groups: torch.Tensor,
    qkv_slices: Sequence[int],
    eps: float,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
    config: Optional[BlockConfig] = None,
) -> None:
    """Fill `out` = (qkv, new_residual).

    Raises ValueError where `fits` objects, for mixed dtypes, and when no linear has LoRA.
    """
    (tokens, width), hidden, intermediate = attention.shape, residual.shape[1], down_weight.shape[1]
    loras = [tuple(lora) for lora in (o_lora, gate_up_lora, down_lora, qkv_lora if qkv_weight is not None else ())]
    present = next((lora for lora in loras if lora), None)
    if present is None:
        raise ValueError("decoder_block_lora: no linear has LoRA; call decoder_block")
    stacks_by_name = {
        f"{name} of {linear}": lora[place]
        for linear, lora in zip(("o", "gate_up", "down", "qkv"), loras, strict=True)
        if lora
        for name, place in (("a", 0), ("b", 2))
    }
    base.check_dtypes(
        "decoder_block_lora",
        attention=attention,
        o_weight=o_weight,
        gate_up_weight=gate_up_weight,
        down_weight=down_weight,
        qkv_weight=qkv_weight,
        **stacks_by_name,
    )
    slots, _, rank = present[2].shape
    sms = multiprocessors(residual.device)
    objection = fits(
        tokens,
        width,
        hidden,
        intermediate,
        qkv_slices if qkv_weight is not None else (),
        rank,
        min(sms, sm_budget or sms),
    )
    if INTERPRETED:
        objection = "Gluon does not run in Triton's interpreter"
    if objection:
        raise ValueError(f"decoder_block_lora: {objection}; compile with lora_lowering='side_stream'")
    block_t = tile_tokens(tokens)
    config, padded, ctas = config or CONFIG[block_t], padded_scales(block_t), hidden // BLOCK * SPLIT
    qkv_width = 0 if qkv_weight is None else qkv_weight.shape[0]
    scratch = base._scratch(residual.device, block_t, hidden, intermediate, attention.dtype)
    stride = min(slots, MAX_TOKENS) * rank * max(PACKED)
    weights = (o_weight, gate_up_weight, down_weight, o_weight if qkv_weight is None else qkv_weight)
    inputs: list[Any] = [
        base._boxes(attention, block_t),
        TensorDescriptor.from_tensor(attention_scale, [1, padded], base._PLAIN),
    ]
    for rows, row_scales in zip(scratch.rows, scratch.scales, strict=True):
        inputs += [base._boxes(rows, block_t), TensorDescriptor.from_tensor(row_scales, [1, padded], base._PLAIN)]
    activations = [tensor for pair in zip(scratch.rows, scratch.scales, strict=True) for tensor in pair]
    stacks = [box for lora in loras for box in _stacks(lora or present, rank)]
    key_tile = qkv_slices[0] // BLOCK if qkv_width else 0
    decoder_block_lora_kernel[ctas + SPLIT,](
        *(base._boxes(weight, BLOCK) for weight in weights), *stacks, *inputs, o_scale, gate_up_scale, down_scale,
        o_scale if qkv_scale is None else qkv_scale, *((lora or present)[1] for lora in loras), groups,
        _shrunk_planes(residual.device, len(PACKED) * SPLIT * block_t * stride), *activations, scratch.squares[0],
        scratch.squares[1], residual, out[1], norm_weight, next_norm_weight, out[0] if qkv_width else out[1],
        scratch.planes, scratch.counters, tokens, eps, STEPS_O=width // BLOCK // SPLIT, STEPS_H=hidden // BLOCK,
        STEPS_DOWN=intermediate // BLOCK // SPLIT, TILES=hidden // BLOCK, GATE_TILES=intermediate // BLOCK,
        QKV_WIDTH=qkv_width, QKV_FIRST=ctas - qkv_width // 64 if qkv_width else ctas - 1, KEY_TILE=key_tile,
        VALUE_TILE=key_tile + qkv_slices[1] // BLOCK if qkv_width else 0,
        LINEARS=tuple((packed if lora else 0 for packed, lora in zip(PACKED, loras, strict=True))), RANK=rank,
        STRIDE=stride, BLOCK_T=block_t, PADDED=padded, SLOTS=config.slots, ROW_SLOTS=config.row_slots,
        DEPTH=config.depth, EARLY_DEPTH=config.early_depth, PDL=pdl, num_warps=config.warps, maxnreg=config.registers,
        launch_pdl=pdl,
    )  # fmt: skip


def _stacks(lora: Sequence[torch.Tensor], rank: int) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """TMA boxes of A (one linear's ranks, 128 columns), of B (128 outputs, all ranks) and of B's scales."""
    a, _, b, b_scale = lora
    return (
        TensorDescriptor.from_tensor(a.flatten(0, 1), [rank, BLOCK], base._SWIZZLED),
        TensorDescriptor.from_tensor(b.flatten(0, 1), [BLOCK, rank], base.swizzled(rank)),
        TensorDescriptor.from_tensor(b_scale.view(-1, BLOCK), [1, BLOCK], base._PLAIN),
    )


@lru_cache(maxsize=16)
def _shrunk_planes(device: torch.device, count: int) -> torch.Tensor:
    return workspace(device, "decoder_block.shrunk", 4 * count)[: 4 * count].view(torch.float32)


decoder_block_lora = register("decoder_block_lora", reference, fake, launch, kind="decoder_block", family="lora")
__all__ = ["decoder_block_lora", "fits", "lora_groups"]
