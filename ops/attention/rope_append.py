"""`rope_append`: from a packed [q | k | v] row to the rotated q and the filled KV cache, in one launch.

x = qkv + delta in fp32; q and k are rotated (and, with `hadamard`, transformed); q is rounded to the model's dtype
once, k (less `key_center`) and v go from fp32 straight into the cache's dtype. `key_balance` moves size between k and q
where one is large and the other small: a RoPE pair of k times its factor and q's by it, which no score sees
(SmoothAttention of QServe, arXiv 2405.04532, does so).
"""

import math
from typing import Optional

import torch
import triton
import triton.language as tl

from ..core.eight_bits import QUANTIZED_MAX
from ..core.kv_layout import KEY, PAGE_SIZE, VALUE
from ..core.registry import register
from ..core.triton_support import cdiv, in_fp32, next_power_of_2, pdl_options, pdl_start, require_contiguous, round_to
from ..rows.hadamard import fht_halves
from ..rows.hadamard import reference as hadamard_reference
from .append_kv import centered, check_cache, check_center, store_heads, store_kv_reference
from .rope import rope_reference, rotate_halves

# up to so many tokens, heads of a program and its warps: the fastest on an H200
PROGRAMS = ((16, 1, 1), (512, 8, 4), (math.inf, 4, 1))
# beyond, the wait that a dependent launch puts into each of very many short programs costs more than the launch that it
# hides
MOST_PDL_TOKENS = 512


def check_balance(balance: Optional[torch.Tensor], num_heads: int, num_kv_heads: int, width: int) -> None:
    """Raises ValueError for factors that don't fit the heads."""
    if balance is not None and (
        balance.shape != (num_kv_heads, width // 2) or balance.dtype != torch.float32 or num_heads % num_kv_heads
    ):
        raise ValueError(
            f"key_balance must be fp32 [{num_kv_heads}, {width // 2}], one factor for each RoPE pair of a kv head, "
            f"and {num_heads} heads "
            f"a multiple of {num_kv_heads}; got {balance.dtype} {list(balance.shape)}"
        )


def reference(
    qkv: torch.Tensor,
    delta: Optional[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    hadamard: bool,
    key_center: Optional[torch.Tensor] = None,
    key_balance: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """qkv and delta [T, (HQ + 2 HK) * D], cos and sin [T, 1, D], slot_mapping [T] int32 (-1: padding) -> q [T, HQ, D].

    Writes the keys and values of the T tokens into kv_cache (and kv_scales) as `append_kv` does. key_balance [HK, D /
    2] fp32, greater than zero, multiplies both channels of a key's RoPE pair and divides those of the queries that meet
    it, after RoPE and before `hadamard`; key_center [HK, D] fp32 is subtracted from the keys as they are stored,
    after both.
    """
    check_cache(kv_cache, kv_scales)
    check_balance(key_balance, num_heads, num_kv_heads, kv_cache.shape[-1])
    total = qkv.float() if delta is None else qkv.float() + delta.float()
    heads = total.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    q_and_k, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    rotated = rope_reference(q_and_k, cos, sin)
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
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    hadamard: bool,
    key_center: Optional[torch.Tensor] = None,
    key_balance: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The results of `reference`, not filled."""
    return qkv.new_empty((qkv.shape[0], num_heads, kv_cache.shape[-1]))


@triton.jit
def _rope_append_kernel(
    qkv, delta, cos, sin, kv_cache, kv_scales, slot_mapping, key_center, key_balance, q, qkv_token, delta_token,
    cos_token, sin_token, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    LIMIT: tl.constexpr, GROUP: tl.constexpr, HAS_DELTA: tl.constexpr, HADAMARD: tl.constexpr, CENTERED: tl.constexpr,
    BALANCED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)  # the groups of q heads come first, then those of k, then those of v
    is_q = group < Q_GROUPS
    is_v = group >= Q_GROUPS + KV_GROUPS
    kind_group = tl.where(is_q, group, tl.where(is_v, group - Q_GROUPS - KV_GROUPS, group - Q_GROUPS))
    head = kind_group * GROUP + tl.arange(0, GROUP)
    present = head < tl.where(is_q, HEADS, KV_HEADS)
    packed_head = head + tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS))
    channel = tl.arange(0, D // 2)[None, :]
    column = packed_head[:, None] * D + channel
    inside = present[:, None]
    if CENTERED:  # a weight: it may be read before the kernel in front has ended
        is_key = (head < tl.where(is_q, 0, tl.where(is_v, 0, KV_HEADS)))[:, None]
        center_first = tl.load(key_center + head[:, None] * D + channel, mask=is_key, other=0.0)
        center_second = tl.load(key_center + head[:, None] * D + channel + D // 2, mask=is_key, other=0.0)
    if BALANCED:
        kv_head = tl.where(is_q, head // (HEADS // KV_HEADS), head)
        turned = (head < tl.where(is_q, HEADS, tl.where(is_v, 0, KV_HEADS)))[:, None]
        balance = tl.load(key_balance + kv_head[:, None] * (D // 2) + channel, mask=turned, other=1.0)
        balance = tl.where(is_q, 1.0 / balance, balance)
    pdl_start(PDL)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    first = in_fp32(tl.load(qkv + token * qkv_token + column, mask=inside, other=0.0))
    second = in_fp32(tl.load(qkv + token * qkv_token + column + D // 2, mask=inside, other=0.0))
    if HAS_DELTA:
        first += in_fp32(tl.load(delta + token * delta_token + column, mask=inside, other=0.0))
        second += in_fp32(tl.load(delta + token * delta_token + column + D // 2, mask=inside, other=0.0))
    if is_v:
        if slot >= 0:
            store_heads(first, second, head, present, 1, slot, kv_cache, kv_scales, KV_HEADS, D, PAGE, LIMIT)
    else:
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
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    hadamard: bool,
    key_center: Optional[torch.Tensor] = None,
    key_balance: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (q,) and the cache: a program has one token and up to eight heads. Too small to heed `sm_budget`."""
    check_cache(kv_cache, kv_scales)
    require_contiguous(
        "rope_append",
        kv_cache=kv_cache,
        kv_scales=kv_scales,
        slot_mapping=slot_mapping,
        key_center=key_center,
        key_balance=key_balance,
    )
    width = kv_cache.shape[-1]
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * width or width != next_power_of_2(width):
        raise ValueError(
            f"rope_append: rows of {qkv.shape[1]} are not {num_heads} + 2 * {num_kv_heads} heads of {width} (a power "
            "of two)"
        )
    check_center(key_center, num_kv_heads, width)
    check_balance(key_balance, num_heads, num_kv_heads, width)
    if qkv.shape[0] == 0:
        return
    heads, warps = next((heads, warps) for most, heads, warps in PROGRAMS if qkv.shape[0] <= most)
    group = min(next_power_of_2(num_heads), heads)
    _rope_append_kernel[qkv.shape[0], cdiv(num_heads, group) + 2 * cdiv(num_kv_heads, group)](
        qkv, delta, cos, sin, kv_cache, kv_scales, slot_mapping, key_center, key_balance, out[0], qkv.stride(0),
        0 if delta is None else delta.stride(0), cos.stride(0), sin.stride(0), HEADS=num_heads, KV_HEADS=num_kv_heads,
        D=width, PAGE=PAGE_SIZE, LIMIT=QUANTIZED_MAX.get(kv_cache.dtype, 0.0), GROUP=group, HAS_DELTA=delta is not None,
        HADAMARD=hadamard, CENTERED=key_center is not None, BALANCED=key_balance is not None, NORM=width ** (-0.5),
        num_warps=warps, **pdl_options(pdl and qkv.shape[0] <= MOST_PDL_TOKENS),
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
