"""`decoder_block`: all linears between the attentions of two decoder layers in one launch.

o -> norm -> gate_up -> SiLU * mul -> down -> norm -> the next q/k/v. For few tokens each of these is bound by the bytes
of its weights, and separate kernels lose time between them. Activations are quantized from fp32 per token and block of
128 columns (`quantize_blocks`): finer than the one scale per token of the separate ops, and not bitwise equal to them.
The kernel (`kernel.py`) needs all its CTAs resident: two launches must not overlap, on any streams.

All quantized tensors are e4m3, or all are int8. In int8, the results of the norms and of SiLU * mul are rotated before
quantization, in blocks of `norm_rotation` and of SILU_ROTATES columns (see `quantize_rowwise`). So the weights of
gate_up, down and q/k/v must be rotated in the same way. Attention's result and the weights of o are not rotated.

H200, Llama-8B shape, 256 cached tokens, us per decode layer with this op (and with separate launches): 1 token 69.2
(76.8), 8: 71.0 (76.4), 16: 72.0 (81.1), 32: 79.1 (88.6), 64: 93.5 (93.7).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Optional

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.device import multiprocessors, workspace
from ..core.dtypes import QUANTIZED_MAX, residual_in_fp32, round_residual
from ..core.registry import register
from ..core.reproducible_sums import mean_square, silu_in_fp32
from ..core.triton_support import INTERPRETED, next_power_of_2
from ..elementwise.quantize import NORM_ROTATES, SILU_ROTATES
from ..elementwise.quantize_blocks import BLOCK, dequantize_blocks, padded_scales
from ..elementwise.quantize_blocks import reference as quantize_blocks_reference
from ..linear.linear_8bit import matmul_8bit
from .kernel import decoder_block_kernel
from .producers import COUNTERS

SPLIT = 4  # CTAs that share a tile of 128 rows of o or down
MAX_TOKENS = 64
MAX_TILES = 128  # tiles of o, down and q/k/v, with one arrival counter each


_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK, element_bitwidth=8, rank=2)  # for the tensor cores
_PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@dataclass(frozen=True)
class BlockConfig:
    """Configuration of the kernel for a number of tokens.

    slots, row_slots   ring sizes: 16 KB weight boxes, blocks of activations
    warps, registers   consumer warps, registers per thread
    depth              weight boxes in flight; early_depth: during the product with the previous matrix
    """

    slots: int
    row_slots: int
    warps: int
    registers: int
    depth: int
    early_depth: int


CONFIGS = {  # padded tokens -> the fastest on an H200
    16: BlockConfig(slots=12, row_slots=6, warps=4, registers=168, depth=4, early_depth=3),
    32: BlockConfig(slots=11, row_slots=6, warps=4, registers=168, depth=4, early_depth=3),
    64: BlockConfig(slots=9, row_slots=6, warps=8, registers=144, depth=4, early_depth=3),
}


def fits(
    tokens: int, attention_width: int, hidden: int, intermediate: int, qkv_width: int, sm_count: int
) -> str | None:
    """Return None if the kernel supports these sizes on `sm_count` SMs, else the reason.

    `qkv_width` 0: no projection after the block.
    """
    ctas = hidden // BLOCK * SPLIT
    widths = {
        "attention width": attention_width,
        "hidden size": hidden,
        "intermediate size": intermediate,
        "q/k/v width": qkv_width,
    }
    if not 1 <= tokens <= MAX_TOKENS:
        return f"{tokens} tokens; at most {MAX_TOKENS} are supported"
    for name, width in widths.items():
        unit = (
            BLOCK * SPLIT
            if name in ("attention width", "intermediate size")
            else 2 * BLOCK
            if name == "hidden size"
            else BLOCK
        )
        if width % unit:
            return f"{name} {width} is not a multiple of {unit}"
    needed = max(ctas, intermediate // BLOCK, qkv_width // 64)
    if needed > min(sm_count, SPLIT * MAX_TILES):
        return f"{needed} CTAs must be resident at once, but the GPU has {sm_count} SMs"
    if needed > ctas:
        return f"the hidden size {hidden} gives {ctas} CTAs, but the other projections need {needed}"
    return None


def _check_dtypes(**tensors: Optional[torch.Tensor]) -> None:
    """Raise ValueError unless the tensors are all e4m3 or all int8."""
    found = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(found.values())) != 1 or not QUANTIZED_MAX.keys() >= set(found.values()):
        given = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
        raise ValueError(
            f"decoder_block: {given}; quantize all of them to {' or all to '.join(map(str, QUANTIZED_MAX))}"
        )


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
    eps: float,
    norm_rotation: int = NORM_ROTATES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (qkv [T, N] in the model's dtype, new_residual [T, H]).

    attention       [T, A] with attention_scale [A / 128, P] (see `quantize_blocks`)
    residual        [T, H]; residuals may be fp16 if the norms' weights are bf16 (`core/dtypes.py`)
    norm weights    [H] in the model's dtype
    weights         [N, K] with scales [N] fp32: o [H, A], gate_up [2I, H] (gate first), down [H, I], q/k/v [N, H];
                    without `qkv_weight` qkv is [T, 0]

    Attention and weights are all e4m3 or all int8. Everything in between is fp32 except the quantized activations: a
    norm's x * weight is quantized, and the product after it is multiplied by 1 / rms. In int8 all activations except
    attention's are rotated before quantization, the norms' results in blocks of `norm_rotation` columns, a power of two
    from 8 to 128.
    """
    dtype, stream, model = attention.dtype, residual.dtype, norm_weight.dtype

    def rounded(total: torch.Tensor) -> torch.Tensor:
        return residual_in_fp32(round_residual(total, stream, model), model)

    update = _project(dequantize_blocks(attention, attention_scale), o_weight, o_scale)
    hidden = rounded(residual_in_fp32(residual, model) + update)
    normed = _quantized(hidden * norm_weight.float(), dtype, norm_rotation)
    gate, up = (_project(normed, gate_up_weight, gate_up_scale) * _inverse_rms(hidden, eps)).chunk(2, dim=-1)
    activated = _quantized(silu_in_fp32(gate) * up, dtype, SILU_ROTATES)
    hidden = rounded(hidden + _project(activated, down_weight, down_scale))
    new_residual = round_residual(hidden, stream, model)
    if qkv_weight is None or qkv_scale is None:
        return norm_weight.new_empty(residual.shape[0], 0), new_residual
    normed = _quantized(hidden * next_norm_weight.float(), dtype, norm_rotation)
    return (_project(normed, qkv_weight, qkv_scale) * _inverse_rms(hidden, eps)).to(model), new_residual


def _project(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    return matmul_8bit(x, weight) * weight_scale


def _quantized(x: torch.Tensor, dtype: torch.dtype, rotate: int) -> torch.Tensor:
    return dequantize_blocks(*quantize_blocks_reference(x, dtype, rotate if dtype == torch.int8 else 0))


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(mean_square(x) + eps)


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
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return norm_weight.new_empty(
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
    eps: float,
    norm_rotation: int = NORM_ROTATES,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (qkv, new_residual).

    Raises ValueError if `fits` returns a reason (also for an `sm_budget` that is too small), and for mixed dtypes.
    """
    _check_dtypes(
        attention=attention,
        o_weight=o_weight,
        gate_up_weight=gate_up_weight,
        down_weight=down_weight,
        qkv_weight=qkv_weight,
    )
    tokens, width = attention.shape
    hidden, intermediate = residual.shape[1], down_weight.shape[1]
    qkv_width = 0 if qkv_weight is None else qkv_weight.shape[0]
    sms = multiprocessors(residual.device)
    objection = fits(tokens, width, hidden, intermediate, qkv_width, min(sms, sm_budget or sms))
    if INTERPRETED:
        objection = "Gluon does not run in Triton's interpreter"
    if objection:
        raise ValueError(f"decoder_block: {objection}; compile with whole_layer='off'")
    block_t = max(16, next_power_of_2(tokens))
    launch_config(
        CONFIGS[block_t], block_t, attention, attention_scale, residual,
        (o_weight, gate_up_weight, down_weight, qkv_weight), (o_scale, gate_up_scale, down_scale, qkv_scale),
        (norm_weight, next_norm_weight), eps, norm_rotation, out, pdl,
    )  # fmt: skip


@dataclass(frozen=True)
class _Scratch:
    """Activations between the stages, planes and counters: one set per device, since launches do not overlap."""

    rows: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]
    squares: torch.Tensor
    planes: torch.Tensor
    counters: torch.Tensor


@lru_cache(maxsize=16)
def _scratch(device: torch.device, block_t: int, hidden: int, intermediate: int, dtype: torch.dtype) -> _Scratch:
    padded, tiles = padded_scales(block_t), hidden // BLOCK
    widths = (hidden, intermediate, hidden)

    def take(key: str, count: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        nbytes = count * dtype.itemsize
        return (
            workspace(device, f"decoder_block.{key}", nbytes, zero=key == "counters")[:nbytes].view(dtype).view(shape)
        )

    return _Scratch(
        tuple(take(f"rows{i}", block_t * width, dtype, block_t, width) for i, width in enumerate(widths)),
        tuple(
            take(f"scales{i}", width // BLOCK * padded, torch.float32, width // BLOCK, padded)
            for i, width in enumerate(widths)
        ),
        take("squares", 2 * tiles * block_t, torch.float32, 2, tiles * block_t),
        take("planes", tiles * SPLIT * BLOCK * block_t, torch.float32, tiles * SPLIT * BLOCK * block_t),
        take("counters", COUNTERS, torch.int32, COUNTERS),
    )


def launch_config(
    config: BlockConfig,
    block_t: int,
    attention: torch.Tensor,
    attention_scale: torch.Tensor,
    residual: torch.Tensor,
    weights: tuple[Optional[torch.Tensor], ...],
    scales: tuple[Optional[torch.Tensor], ...],
    gains: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    norm_rotation: int,
    out: tuple[torch.Tensor, ...],
    pdl: bool,
) -> None:
    """Run the configuration `config`; weights and scales are in the order o, gate_up, down, q/k/v."""
    (tokens, width), hidden, intermediate = attention.shape, residual.shape[1], weights[2].shape[1]  # type: ignore[union-attr]
    padded, ctas, has_qkv = padded_scales(block_t), hidden // BLOCK * SPLIT, weights[3] is not None
    qkv_width = weights[3].shape[0] if weights[3] is not None else 0
    scratch = _scratch(residual.device, block_t, hidden, intermediate, attention.dtype)
    boxes = [_boxes(weight, BLOCK) for weight in weights[:3] if weight is not None]
    boxes.append(boxes[0] if weights[3] is None else _boxes(weights[3], BLOCK))
    inputs: list[Any] = [_boxes(attention, block_t), TensorDescriptor.from_tensor(attention_scale, [1, padded], _PLAIN)]
    for rows, row_scales in zip(scratch.rows, scratch.scales, strict=True):
        inputs += [_boxes(rows, block_t), TensorDescriptor.from_tensor(row_scales, [1, padded], _PLAIN)]
    pointers = [tensor for pair in zip(scratch.rows, scratch.scales, strict=True) for tensor in pair]
    decoder_block_kernel[ctas,](
        *boxes, *inputs, *scales[:3], scales[3] if has_qkv else scales[0], *pointers, scratch.squares[0],
        scratch.squares[1], residual, out[1], *gains, out[0] if has_qkv else out[1], scratch.planes, scratch.counters,
        tokens, eps, STEPS_O=width // BLOCK // SPLIT, STEPS_H=hidden // BLOCK,
        STEPS_DOWN=intermediate // BLOCK // SPLIT, TILES=hidden // BLOCK, GATE_TILES=intermediate // BLOCK,
        QKV_WIDTH=qkv_width, QKV_FIRST=ctas - qkv_width // 64 if has_qkv else ctas - 1, HAS_QKV=has_qkv,
        BLOCK_T=block_t, PADDED=padded, SLOTS=config.slots, ROW_SLOTS=config.row_slots, DEPTH=config.depth,
        EARLY_DEPTH=config.early_depth, NORM_ROTATES=norm_rotation, PDL=pdl, num_warps=config.warps,
        maxnreg=config.registers, launch_pdl=pdl,
    )  # fmt: skip


def _boxes(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return TMA boxes of `rows` rows and 128 columns; a captured graph stores the descriptor by value."""
    return TensorDescriptor.from_tensor(matrix, [rows, BLOCK], _SWIZZLED)


decoder_block = register("decoder_block", reference, fake, launch, kind="decoder_block")
