"""linear_8bit_lora_silu_mul: silu(gate) * up of a packed [gate | up] projection in int8 with its LoRA branch, in one launch for the tokens of a decode step.

Neither the projection nor the delta is written. The kernel is in `linear_8bit_lora_gluon.py`; here are the specification and the launch.
"""
from typing import NamedTuple, Optional

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .linear_8bit import MAX_INT8_K, matmul_fp32, multiprocessors
from .linear_8bit_lora_gluon import linear_8bit_lora_kernel
from .linear_8bit_wide import GROUP
from .lora_active import TILE
from .quantize import quantize_rowwise_reference
from .registry import register
from .triton_support import INTERPRETED, cdiv, require_contiguous
from .tuning import BLOCK_K
from .workspace import workspace

RANKS = (32, 64)
MIN_TOKENS, MAX_TOKENS = 65, 256  # with fewer, LoRA hides beside a projection that waits for its weights
BLOCK_N = 256  # rows of weights in a tile: 128 gates and their 128 ups
STAGES = 4
MAX_REGISTERS = 168
PRODUCER_REGISTERS = 24
SHRINKING = 8  # programs that are left to shrink at least, where a GPU has so many that it doesn't matter to the others
MANY_SMS = 64
_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_ROWS = {rank: gl.NVMMASharedLayout(swizzle_byte_width=rank, element_bitwidth=8, rank=2) for rank in RANKS}
_STAGING = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class Programs(NamedTuple):
    """How a launch shares its work: `tiles` programs multiply, `shrinking` ones apply the adapters' A."""

    tiles: int
    shrinking: int


def programs(tokens: int, n: int, slots: int, sms: int) -> Programs:
    """As many programs with tiles as end together; the SMs that are left shrink, so that all of them are resident at once."""
    token_tiles = cdiv(tokens, TILE)
    tiles = n // BLOCK_N * token_tiles
    multiplying = cdiv(tiles, cdiv(tiles, sms - (SHRINKING if sms >= MANY_SMS else 1)))
    return Programs(multiplying, min(sms - multiplying, min(slots, tokens) * token_tiles))


def fits(tokens: int, n: int, k: int, rank: int, slots: int, sm_count: int) -> str | None:
    """None when the kernel takes a weight [n, k] with `slots` adapters of this rank on a GPU of `sm_count` SMs, else the reason why not."""
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        return f"{tokens} tokens; it takes {MIN_TOKENS} to {MAX_TOKENS}"
    if n == 0 or n % BLOCK_N:
        return f"{n} rows of weights; it takes multiples of {BLOCK_N}"
    if k % BLOCK_K or not STAGES * BLOCK_K <= k <= MAX_INT8_K:
        return f"{k} input features; it takes multiples of {BLOCK_K} from {STAGES * BLOCK_K} to {MAX_INT8_K}"
    if rank not in RANKS:
        return f"LoRA stacks of rank {rank}; it takes {', '.join(map(str, RANKS))}"
    if slots < 1:
        return "no adapters"
    if sm_count < 2:
        return f"programs that multiply and one that shrinks must be resident at once, the GPU has {sm_count} SMs"
    return None


def lora_delta(
    q: torch.Tensor, scale: torch.Tensor, a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, adapter_index: torch.Tensor
) -> torch.Tensor:
    """fp32 [T, 2I]: (q a[slot]^T * scale * a_scale in bf16, then int8) times b[slot] * b_scale, gate and up each with their half of the ranks.

    Zeros for tokens without an adapter.
    """
    width, ranks = b.shape[1] // 2, b.shape[2]
    halves = (slice(0, ranks), slice(0, width)), (slice(ranks, None), slice(width, None))
    delta = torch.zeros(q.shape[0], b.shape[1], device=q.device)
    for slot in adapter_index.unique().tolist():
        if slot >= 0:
            tokens = (adapter_index == slot).nonzero().squeeze(1)
            shrunk = (matmul_fp32(q[tokens].float(), a[slot]) * scale[tokens].unsqueeze(-1) * a_scale[slot]).bfloat16()
            for own_ranks, rows in halves:
                rounded, rank_scale = quantize_rowwise_reference(shrunk[:, own_ranks], torch.int8)
                delta[tokens, rows] = matmul_fp32(rounded.float(), b[slot, rows]) * rank_scale.unsqueeze(-1) * b_scale[slot, rows]
    return delta


def reference(
    q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor,
    adapter_index: torch.Tensor, active: torch.Tensor, out_dtype: torch.dtype,
) -> torch.Tensor:
    """silu(gate) * up [T, I] of `out_dtype`, (gate, up) = q weight^T * scale * weight_scale + delta in fp32, rounded once.

    q, scale              [T, K] int8, [T] fp32
    weight, weight_scale  [2I, K] int8, [2I] fp32; the first I rows are the gate
    a, a_scale            [S, 2R, K] int8, [S, 2R] fp32: the A matrices of S adapters, the gate's ranks first
    b, b_scale            [S, 2I, R] int8, [S, 2I] fp32; alpha / rank already folded in
    adapter_index         [T] int32, -1 = no adapter: no delta
    active                `lora_active` of it

    Between A and B the ranks' activations are rounded to bf16, then to int8 with one scale for each token and half. Raises ValueError for what doesn't fit.
    """
    check(q, scale, weight, weight_scale, a, a_scale, b, b_scale, adapter_index, active)
    y = matmul_fp32(q.float(), weight) * scale.unsqueeze(-1) * weight_scale
    gate, up = (y + lora_delta(q, scale, a, a_scale, b, b_scale, adapter_index)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(out_dtype)


def fake(
    q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor,
    adapter_index: torch.Tensor, active: torch.Tensor, out_dtype: torch.dtype,
) -> torch.Tensor:
    check(q, scale, weight, weight_scale, a, a_scale, b, b_scale, adapter_index, active)
    return q.new_empty((q.shape[0], weight.shape[0] // 2), dtype=out_dtype)


def check(
    q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, adapter_index: torch.Tensor, active: torch.Tensor,
) -> None:
    """Raises ValueError for shapes and dtypes that are not those of `reference`."""
    if any(tensor.dtype != torch.int8 for tensor in (q, weight, a, b)):
        raise ValueError(f"linear_8bit_lora_silu_mul: q, weight, a and b are {q.dtype}, {weight.dtype}, {a.dtype} and {b.dtype}; all must be torch.int8")
    slots, n, ranks = b.shape
    expected = {"q": (q, (q.shape[0], weight.shape[1])), "scale": (scale, q.shape[:1]), "weight": (weight, (n, q.shape[1])),
                "weight_scale": (weight_scale, (n,)), "a": (a, (slots, 2 * ranks, q.shape[1])), "a_scale": (a_scale, (slots, 2 * ranks)),
                "b_scale": (b_scale, (slots, n)), "adapter_index": (adapter_index, q.shape[:1])}
    for name, (tensor, shape) in expected.items():
        if tensor.shape != torch.Size(shape):
            raise ValueError(f"linear_8bit_lora_silu_mul: {name} is {tuple(tensor.shape)}, beside q {tuple(q.shape)} and b {tuple(b.shape)} it must be "
                             f"{tuple(shape)}")
    if n % 2 or active.dim() != 2 or active.shape[1] != slots + 1:
        raise ValueError(f"linear_8bit_lora_silu_mul: {n} rows of weights for gate and up, and active {tuple(active.shape)}; needs an even number of rows, "
                         f"and what lora_active makes of adapter_index for {slots} slots")


def launch(
    q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor,
    adapter_index: torch.Tensor, active: torch.Tensor, out_dtype: torch.dtype,
    *, out: tuple[torch.Tensor, ...], sm_budget: Optional[int] = None, pdl: bool = False,
) -> None:
    """Fill `out` = (h,). Raises ValueError where `fits` objects and for results other than bf16."""
    if out_dtype != torch.bfloat16:
        raise ValueError(f"linear_8bit_lora_silu_mul: the kernel's results are torch.bfloat16, not {out_dtype}")
    (tokens, k), n, (slots, _, rank) = q.shape, weight.shape[0], b.shape
    if tokens == 0:
        return
    sms = multiprocessors(q.device)
    sms = min(sms, sm_budget or sms)
    objection = "Gluon does not run in Triton's interpreter" if INTERPRETED else fits(tokens, n, k, rank, slots, sms)
    if objection:
        raise ValueError(f"linear_8bit_lora_silu_mul: {objection}; run linear_8bit, lora_shrink, lora_expand and silu_mul")
    require_contiguous("linear_8bit_lora_silu_mul", q=q, scale=scale, weight=weight, weight_scale=weight_scale, a=a, a_scale=a_scale, b=b, b_scale=b_scale,
                       adapter_index=adapter_index, active=active)
    split = programs(tokens, n, slots, sms)
    ranks = workspace(q.device, "linear_8bit_lora.ranks", MAX_TOKENS * 2 * max(RANKS)).view(torch.int8)
    rank_scales = workspace(q.device, "linear_8bit_lora.rank_scales", MAX_TOKENS * 2 * 4).view(torch.float32)
    places = workspace(q.device, "linear_8bit_lora.places", MAX_TOKENS * 4).view(torch.int32)
    counter = workspace(q.device, "linear_8bit_lora.counter", 4, zero=True).view(torch.int32)
    # The tensor maps are encoded by the launch itself and travel as kernel arguments, so a captured graph holds its own copies.
    linear_8bit_lora_kernel[(split.tiles + split.shrinking,)](
        TensorDescriptor.from_tensor(weight, [128, BLOCK_K], _SWIZZLED), TensorDescriptor.from_tensor(q, [TILE, BLOCK_K], _SWIZZLED),
        TensorDescriptor.from_tensor(weight_scale.view(-1, 128), [1, 128], _PLAIN),
        TensorDescriptor.from_tensor(a.flatten(0, 1), [2 * rank, BLOCK_K], _SWIZZLED),
        TensorDescriptor.from_tensor(b.flatten(0, 1), [128, rank], _ROWS[rank]),
        TensorDescriptor.from_tensor(out[0], [TILE, 64], _STAGING),
        scale, a_scale, b_scale, adapter_index, active, ranks, rank_scales, places, counter, tokens, split.tiles, split.shrinking, slots + 1,
        N=n, K=k, RANK=rank, BLOCK_T=TILE, BLOCK_K=BLOCK_K, STAGES=STAGES, GROUP=GROUP, PRODUCER_REGISTERS=PRODUCER_REGISTERS, PDL=pdl, num_warps=8,
        maxnreg=MAX_REGISTERS, launch_pdl=pdl,
    )


linear_8bit_lora_silu_mul = register("linear_8bit_lora_silu_mul", reference, fake, launch)
__all__ = ["fits", "linear_8bit_lora_silu_mul"]
