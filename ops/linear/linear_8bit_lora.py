"""`linear_8bit_lora`: an int8 linear for prompt steps that computes and adds the LoRA delta in its tiles.

`lora_shrink` runs before. The second half of LoRA is a product with few ranks, which is added to a tile's sums before
they are rounded. The kernel is in `kernel_lora_large.py`; this file has the specification and the launch.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.device import multiprocessors
from ..core.registry import register
from ..core.reproducible_sums import product
from ..core.triton_support import INTERPRETED, cdiv, require_contiguous
from ..lora.plan import lora_splits
from .kernel_large import GROUP, PRODUCER_REGISTERS
from .kernel_lora_large import linear_8bit_lora_large_kernel
from .kernel_selection import BLOCK_K, LARGE_PIECE, LinearConfig, int8_cost, large_candidates, linear_config, work_split
from .linear_8bit import MAX_INT8_K, matmul_8bit

RANKS = (16, 32, 64)
MAX_TOKENS = 65536
LEAST_CHUNK = 16  # minimum ranks of a plane that one step of a tile sums
CONSUMER_REGISTERS = 240
_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_STAGING = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def candidates(slices: Sequence[int], rank: int) -> list[LinearConfig]:
    """Return configurations in which a tile has one slice and the consumers have registers for the ranks.

    With 64 ranks these have two consumers of 64 tokens each.
    """
    return [
        config
        for config in large_candidates()
        if config.warps == 8
        and config.block_t * rank <= 64 * 128
        and all(width > 0 and width % config.block_n == 0 for width in slices)
    ]


def lora_config(tokens: int, k: int, slices: Sequence[int], rank: int, sm_count: int) -> LinearConfig:
    """Return the linear's tuned configuration if it is a candidate, else the one with least work on the busiest SM."""
    n = sum(slices)
    tuned, found = linear_config(tokens, n, k, sm_count, int8=True), candidates(slices, rank)
    return tuned if tuned in found else min(found, key=lambda config: int8_cost(config, tokens, n, k, sm_count))


def fits(tokens: int, k: int, slices: Sequence[int], rank: int, slots: int, splits: Optional[int] = None) -> str | None:
    """Return None if the kernel supports a weight [sum(slices), k] with `slots` adapters of this rank, else the reason.

    splits  number of planes; None: that of `lora_splits`
    """
    splits = lora_splits(k, tokens) if splits is None else splits
    if not 1 <= tokens <= MAX_TOKENS:
        return f"{tokens} tokens; supported are 1 to {MAX_TOKENS}"
    if rank not in RANKS:
        return f"LoRA stacks of rank {rank}; supported are {', '.join(map(str, RANKS))}"
    # steps of a tile: one without a sum, then one per chunk of each plane
    steps = 1 + splits * rank // LEAST_CHUNK
    if k % 16 or not (steps - 1) * BLOCK_K < k <= MAX_INT8_K:
        return (
            f"{k} input features; with {splits} planes of rank {rank} supported are multiples of 16 from "
            f"{(steps - 1) * BLOCK_K + 16} to {MAX_INT8_K}"
        )
    if not 1 <= len(slices) <= 3:
        return f"{len(slices)} packed linears; supported are 1 to 3"
    if not candidates(slices, rank):
        return (
            f"packed linears of {', '.join(map(str, slices))} rows; with rank {rank} supported are multiples of "
            f"{256 if rank > 32 else 128}"
        )
    if slots < 1:
        return "no adapters"
    if slots * sum(slices) * rank >= 2**31:
        return (
            f"{slots} adapters; with {sum(slices)} rows of rank {rank} at most "
            f"{(2**31 - 1) // (sum(slices) * rank)} are supported"
        )
    return None


def expanded(
    planes: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, adapter_index: torch.Tensor, slices: Sequence[int]
) -> torch.Tensor:
    """Return the delta, fp32 [T, N]: the planes' sum in bf16 times (b[slot] * b_scale in bf16), slice by slice.

    It is zero for tokens without an adapter.
    """
    ranks = b.shape[2]
    total = planes[0]
    for plane in planes[1:]:
        total = total + plane
    shrunk = total.bfloat16().float()
    delta = torch.zeros(planes.shape[1], b.shape[1], device=b.device)
    for slot in adapter_index.unique().tolist():
        if slot >= 0:
            tokens = (adapter_index == slot).nonzero().squeeze(1)
            rows = (b[slot].float() * b_scale[slot].unsqueeze(-1)).bfloat16().float()
            parts = zip(shrunk[tokens].split(ranks, dim=1), rows.split(list(slices)), strict=True)
            delta[tokens] = torch.cat([product(part, own, torch.float32) for part, own in parts], dim=1)
    return delta


def reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    planes: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    adapter_index: torch.Tensor,
    active: torch.Tensor,
    slices: Sequence[int],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return q weight^T * scale * weight_scale + delta, [T, N] of `out_dtype`, summed in fp32 and rounded once.

    q, scale              [T, K] int8, [T] fp32
    weight, weight_scale  [N, K] int8, [N] fp32
    planes                [splits, T, n*R] fp32 of `lora_shrink`; added in order and rounded to bf16
    b, b_scale            [S, N, R] int8, [S, N] fp32, includes alpha / rank; a row times its scale is rounded to bf16
    adapter_index         [T] int32, -1 = no adapter: no delta
    active                `lora_active` of it
    slices                the n output widths (1 to 3) of the packed linears, adding up to N; columns of slice i use
                          ranks i*R..

    Raises ValueError for shapes and dtypes that don't match.
    """
    check(q, scale, weight, weight_scale, planes, b, b_scale, adapter_index, active, slices)
    y = matmul_8bit(q, weight) * scale.unsqueeze(-1) * weight_scale
    return (y + expanded(planes, b, b_scale, adapter_index, slices)).to(out_dtype)


def fake(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    planes: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    adapter_index: torch.Tensor,
    active: torch.Tensor,
    slices: Sequence[int],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return an empty result."""
    check(q, scale, weight, weight_scale, planes, b, b_scale, adapter_index, active, slices)
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=out_dtype)


def check(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    planes: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    adapter_index: torch.Tensor,
    active: torch.Tensor,
    slices: Sequence[int],
) -> None:
    """Raise ValueError unless shapes and dtypes are those of `reference`."""
    if any(tensor.dtype != torch.int8 for tensor in (q, weight, b)):
        raise ValueError(
            f"linear_8bit_lora: q, weight and b are {q.dtype}, {weight.dtype} and {b.dtype}; all must be torch.int8"
        )
    slots, n, ranks = b.shape
    if not 1 <= len(slices) <= 3 or sum(slices) != n or active.dim() != 2 or active.shape[1] != slots + 1:
        raise ValueError(
            f"linear_8bit_lora: slices {list(slices)} and active {tuple(active.shape)} for b {tuple(b.shape)}; "
            "needs 1 to 3 slices that add "
            f"up to {n}, and active from lora_active for {slots} slots"
        )
    expected = {
        "q": (q, (q.shape[0], weight.shape[1])),
        "scale": (scale, q.shape[:1]),
        "weight": (weight, (n, q.shape[1])),
        "weight_scale": (weight_scale, (n,)),
        "planes": (planes, (planes.shape[0], q.shape[0], len(slices) * ranks)),
        "b_scale": (b_scale, (slots, n)),
        "adapter_index": (adapter_index, q.shape[:1]),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != torch.Size(shape):
            raise ValueError(
                f"linear_8bit_lora: {name} is {tuple(tensor.shape)}, for q {tuple(q.shape)}, b {tuple(b.shape)} "
                f"and {len(slices)} slices it "
                f"must be {tuple(shape)}"
            )


def launch(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    planes: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    adapter_index: torch.Tensor,
    active: torch.Tensor,
    slices: Sequence[int],
    out_dtype: torch.dtype,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
    config: Optional[LinearConfig] = None,
) -> None:
    """Fill `out` = (y,). Raises ValueError if `fits` returns a reason, and for results other than bf16."""
    if out_dtype != torch.bfloat16:
        raise ValueError(f"linear_8bit_lora: the kernel's results are torch.bfloat16, not {out_dtype}")
    (tokens, k), (slots, n, rank), splits = q.shape, b.shape, planes.shape[0]
    if tokens == 0:
        return
    objection = (
        "Gluon does not run in Triton's interpreter" if INTERPRETED else fits(tokens, k, slices, rank, slots, splits)
    )
    if objection:
        raise ValueError(f"linear_8bit_lora: {objection}; compile with disable=('fuse_lora_expand',)")
    require_contiguous(
        "linear_8bit_lora", q=q, scale=scale, weight=weight, weight_scale=weight_scale, planes=planes, b=b,
        b_scale=b_scale, adapter_index=adapter_index, active=active,
    )  # fmt: skip
    sms = multiprocessors(q.device)
    config = config or lora_config(tokens, k, slices, rank, sms)
    split = work_split(config, tokens, n, k, min(sms, sm_budget or sms))
    consumers = config.warps // 4
    rows = config.block_t // consumers
    # The launch encodes the tensor maps as kernel arguments, so a captured graph has its own copies.
    linear_8bit_lora_large_kernel[split.programs,](
        TensorDescriptor.from_tensor(weight, [config.block_n, BLOCK_K], _SWIZZLED),
        TensorDescriptor.from_tensor(q, [rows, BLOCK_K], _SWIZZLED),
        TensorDescriptor.from_tensor(out[0], [rows, LARGE_PIECE], _STAGING), scale, weight_scale, planes, b, b_scale,
        adapter_index, active, tokens, cdiv(tokens, config.block_t), cdiv(k, BLOCK_K), splits, slots + 1, N=n,
        SECOND=slices[0], THIRD=sum(slices[:2]), RANK=rank, ALL_RANKS=len(slices) * rank, ROWS=rows,
        BLOCK_N=config.block_n, BLOCK_K=BLOCK_K, STAGES=config.stages, CONSUMERS=consumers,
        BUFFERS=1 if rows > 64 else 2, PIECE=LARGE_PIECE, GROUP=GROUP, CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS, PDL=pdl, num_warps=4, maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip


linear_8bit_lora = register("linear_8bit_lora", reference, fake, launch, kind="linear", family="lora")
__all__ = ["fits", "linear_8bit_lora", "lora_config"]
