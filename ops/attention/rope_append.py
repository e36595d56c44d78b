"""`rope_append`: rotate q and append k and v to the KV cache, from a packed [q | k | v] row, in one launch.

x = qkv + bias + delta in fp32. q and k are normed per head if the model does so, rotated and, with `hadamard`,
transformed. q is rounded to the model's dtype once; k (minus `key_center`) and v are converted from fp32 directly to
the cache's dtype. `key_balance` multiplies a RoPE pair of k by its factor and q's by the inverse, which leaves scores
unchanged (SmoothAttention of QServe, arXiv 2405.04532).

The projection's bias is added here and not in its GEMM. So the sum is not rounded to 16 bits in between (biases of keys
can be hundreds of times larger than the rest), and linears do not need a bias.
"""

import math
from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.dtypes import QUANTIZED_MAX
from ..core.kv_layout import KEY, PAGE_SIZE, VALUE
from ..core.registry import register
from ..core.reproducible_sums import mean_square
from ..core.triton_support import cdiv, in_fp32, next_power_of_2, pdl_options, pdl_start, require_contiguous, round_to
from ..elementwise.hadamard import fht_halves
from ..elementwise.hadamard import reference as hadamard_reference
from .append_kv import centered, check_cache, check_center, store_heads, store_kv_reference
from .rope import rope_reference, rotate_halves

# (most tokens, heads per program, warps): the fastest on an H200
PROGRAMS = ((16, 1, 1), (512, 8, 4), (math.inf, 4, 1))
# with more tokens, waits in very many short programs take longer than the launch latency that PDL hides
MOST_PDL_TOKENS = 512


def check_balance(balance: Optional[torch.Tensor], num_heads: int, num_kv_heads: int, width: int) -> None:
    """Raise ValueError unless the factors match the heads."""
    if balance is not None and (
        balance.shape != (num_kv_heads, width // 2) or balance.dtype != torch.float32 or num_heads % num_kv_heads
    ):
        raise ValueError(
            f"key_balance must be fp32 [{num_kv_heads}, {width // 2}], one factor per RoPE pair of a kv head, "
            f"and {num_heads} heads "
            f"a multiple of {num_kv_heads}; got {balance.dtype} {list(balance.shape)}"
        )


def check_angles(cos: Optional[torch.Tensor], sin: Optional[torch.Tensor]) -> None:
    """Raise ValueError for cos without sin or sin without cos."""
    if (cos is None) != (sin is None):
        raise ValueError("rope_append needs both cos and sin, or neither")


def check_row(name: str, weight: Optional[torch.Tensor], *shape: int) -> None:
    """Raise ValueError unless a bias or norm weight has this shape."""
    if weight is not None and tuple(weight.shape) != shape:
        raise ValueError(f"rope_append: {name} must be {list(shape)}, got {list(weight.shape)}")


def norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of each head, heads [T, H, D] fp32, weight [H, D] or [D], in fp32."""
    return heads * torch.rsqrt(mean_square(heads) + eps) * weight.float()


def reference(
    qkv: torch.Tensor,
    delta: Optional[torch.Tensor],
    cos: Optional[torch.Tensor],
    sin: Optional[torch.Tensor],
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    hadamard: bool,
    key_center: Optional[torch.Tensor] = None,
    key_balance: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    head_norm: Optional[torch.Tensor] = None,
    norm_eps: float = 0.0,
    exact: bool = False,
) -> torch.Tensor:
    """Return the rotated q [T, HQ, D] and write the keys and values of the T tokens to the cache, as `append_kv` does.

    qkv, delta    [T, (HQ + 2 HK) * D]; bias [(HQ + 2 HK) * D]
    cos, sin      [T, 1, D]; None: no rotation
    slot_mapping  [T] int32, -1: padding
    key_balance   [HK, D / 2] fp32 > 0: multiplies both channels of a key's RoPE pair and divides those of its queries,
                  after RoPE and before `hadamard`
    key_center    [HK, D] fp32: subtracted from stored keys, after both
    head_norm     [2, D]: RMS norm weights of the heads of q and of k, with norm_eps
    exact         a token's bits do not depend on T, also on a GPU
    """
    check_cache(kv_cache, kv_scales)
    check_balance(key_balance, num_heads, num_kv_heads, kv_cache.shape[-1])
    check_angles(cos, sin)
    check_row("bias", bias, qkv.shape[1])
    check_row("head_norm", head_norm, 2, kv_cache.shape[-1])
    total = qkv.float() if bias is None else qkv.float() + bias.float()
    total = total if delta is None else total + delta.float()
    heads = total.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    q_and_k, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if head_norm is not None:
        counts = torch.tensor((num_heads, num_kv_heads), device=qkv.device)
        q_and_k = norm_heads(q_and_k, head_norm.repeat_interleave(counts, dim=0), norm_eps)
    rotated = q_and_k if cos is None or sin is None else rope_reference(q_and_k, cos, sin)
    if key_balance is not None:
        both = torch.cat((key_balance, key_balance), dim=-1)
        rotated = rotated * torch.cat((1.0 / both.repeat_interleave(num_heads // num_kv_heads, dim=0), both))
    if hadamard:
        rotated = hadamard_reference(rotated)
    q, k = rotated.split((num_heads, num_kv_heads), dim=1)
    store_kv_reference(centered(k, key_center), KEY, kv_cache, kv_scales, slot_mapping)
    store_kv_reference(v, VALUE, kv_cache, kv_scales, slot_mapping)
    return q.to(qkv.dtype, copy=True).contiguous()


def fake(
    qkv: torch.Tensor,
    delta: Optional[torch.Tensor],
    cos: Optional[torch.Tensor],
    sin: Optional[torch.Tensor],
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    num_heads: int,
    *_: Any,
) -> torch.Tensor:
    """Return an empty result."""
    return qkv.new_empty((qkv.shape[0], num_heads, kv_cache.shape[-1]))


@triton.jit
def _rope_append_kernel(
    qkv, delta, cos, sin, kv_cache, kv_scales, slot_mapping, key_center, key_balance, bias, head_norm, q, qkv_token,
    delta_token, cos_token, sin_token, norm_eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, LIMIT: tl.constexpr, GROUP: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr,
    HEAD_NORM: tl.constexpr, ROTATES: tl.constexpr, HADAMARD: tl.constexpr, CENTERED: tl.constexpr,
    BALANCED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)  # groups of q heads first, then k, then v
    is_q = group < Q_GROUPS
    is_v = group >= Q_GROUPS + KV_GROUPS
    kind_group = tl.where(is_q, group, tl.where(is_v, group - Q_GROUPS - KV_GROUPS, group - Q_GROUPS))
    head = kind_group * GROUP + tl.arange(0, GROUP)
    present = head < tl.where(is_q, HEADS, KV_HEADS)
    packed_head = head + tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS))
    channel = tl.arange(0, D // 2)[None, :]
    column = packed_head[:, None] * D + channel
    inside = present[:, None]
    if CENTERED:  # a weight: may be read before the previous kernel has ended
        is_key = (head < tl.where(is_q, 0, tl.where(is_v, 0, KV_HEADS)))[:, None]
        center_first = tl.load(key_center + head[:, None] * D + channel, mask=is_key, other=0.0)
        center_second = tl.load(key_center + head[:, None] * D + channel + D // 2, mask=is_key, other=0.0)
    if BALANCED:
        kv_head = tl.where(is_q, head // (HEADS // KV_HEADS), head)
        turned = (head < tl.where(is_q, HEADS, tl.where(is_v, 0, KV_HEADS)))[:, None]
        balance = tl.load(key_balance + kv_head[:, None] * (D // 2) + channel, mask=turned, other=1.0)
        balance = tl.where(is_q, 1.0 / balance, balance)
    if HAS_BIAS:
        bias_first = in_fp32(tl.load(bias + column, mask=inside, other=0.0))
        bias_second = in_fp32(tl.load(bias + column + D // 2, mask=inside, other=0.0))
    if HEAD_NORM:
        gain = head_norm + tl.where(is_q, 0, D) + channel
        gain_first = in_fp32(tl.load(gain))
        gain_second = in_fp32(tl.load(gain + D // 2))
    pdl_start(PDL)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    first = in_fp32(tl.load(qkv + token * qkv_token + column, mask=inside, other=0.0))
    second = in_fp32(tl.load(qkv + token * qkv_token + column + D // 2, mask=inside, other=0.0))
    if HAS_BIAS:
        first += bias_first
        second += bias_second
    if HAS_DELTA:
        first += in_fp32(tl.load(delta + token * delta_token + column, mask=inside, other=0.0))
        second += in_fp32(tl.load(delta + token * delta_token + column + D // 2, mask=inside, other=0.0))
    if is_v:
        if slot >= 0:
            store_heads(first, second, head, present, 1, slot, kv_cache, kv_scales, KV_HEADS, D, PAGE, LIMIT)
    else:
        if HEAD_NORM:
            mean = tl.sum(first * first + second * second, axis=1) / D
            root = tl.rsqrt(mean + norm_eps)[:, None]
            first *= root * gain_first
            second *= root * gain_second
        if ROTATES:
            first, second = rotate_halves(first, second, cos + token * cos_token, sin + token * sin_token, GROUP, D)
        if BALANCED:
            first *= balance
            second *= balance
        if HADAMARD:
            first, second = fht_halves(first, second, GROUP, D // 2, NORM)
        if is_q:
            target = q + (token * HEADS + head[:, None]) * D + channel
            tl.store(target, round_to(first, q.dtype.element_ty), mask=inside)
            tl.store(target + D // 2, round_to(second, q.dtype.element_ty), mask=inside)
        elif slot >= 0:
            if CENTERED:
                first -= center_first
                second -= center_second
            store_heads(first, second, head, present, 0, slot, kv_cache, kv_scales, KV_HEADS, D, PAGE, LIMIT)


def launch(
    qkv: torch.Tensor,
    delta: Optional[torch.Tensor],
    cos: Optional[torch.Tensor],
    sin: Optional[torch.Tensor],
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    hadamard: bool,
    key_center: Optional[torch.Tensor] = None,
    key_balance: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    head_norm: Optional[torch.Tensor] = None,
    norm_eps: float = 0.0,
    exact: bool = False,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (q,) and write to the cache; a program has one token and up to eight heads. Ignores `sm_budget`."""
    check_cache(kv_cache, kv_scales)
    require_contiguous(
        "rope_append", kv_cache=kv_cache, kv_scales=kv_scales, slot_mapping=slot_mapping, key_center=key_center,
        key_balance=key_balance, bias=bias, head_norm=head_norm,
    )  # fmt: skip
    width = kv_cache.shape[-1]
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * width or width != next_power_of_2(width):
        raise ValueError(
            f"rope_append: rows of {qkv.shape[1]} are not {num_heads} + 2 * {num_kv_heads} heads of {width} (a power "
            "of two)"
        )
    check_center(key_center, num_kv_heads, width)
    check_balance(key_balance, num_heads, num_kv_heads, width)
    check_angles(cos, sin)
    check_row("bias", bias, qkv.shape[1])
    check_row("head_norm", head_norm, 2, width)
    if qkv.shape[0] == 0:
        return
    by_size = next((heads, warps) for most, heads, warps in PROGRAMS if qkv.shape[0] <= most)
    heads, warps = PROGRAMS[1][1:] if exact else by_size  # sums of head_norm depend on these
    group = min(next_power_of_2(num_heads), heads)
    _rope_append_kernel[qkv.shape[0], cdiv(num_heads, group) + 2 * cdiv(num_kv_heads, group)](
        qkv, delta, cos, sin, kv_cache, kv_scales, slot_mapping, key_center, key_balance, bias, head_norm, out[0],
        qkv.stride(0), 0 if delta is None else delta.stride(0), 0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0), norm_eps, HEADS=num_heads, KV_HEADS=num_kv_heads, D=width, PAGE=PAGE_SIZE,
        LIMIT=QUANTIZED_MAX.get(kv_cache.dtype, 0.0), GROUP=group, HAS_DELTA=delta is not None,
        HAS_BIAS=bias is not None, HEAD_NORM=head_norm is not None, ROTATES=cos is not None, HADAMARD=hadamard,
        CENTERED=key_center is not None, BALANCED=key_balance is not None, NORM=width ** (-0.5), num_warps=warps,
        **pdl_options(pdl and qkv.shape[0] <= MOST_PDL_TOKENS),
    )  # fmt: skip


rope_append = register(
    "rope_append",
    reference,
    fake,
    launch,
    mutates=("kv_cache", "kv_scales"),
    kind="rope_append",
    family="rope",
)
