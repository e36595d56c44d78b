"""`append_kv`: quantize keys and values to the cache's dtype and store them at their slots (layout: `kv_layout`)."""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.dtypes import QUANTIZED_MAX
from ..core.kv_layout import KEY, PAGE_SIZE, VALUE
from ..core.registry import register
from ..core.triton_support import (
    cdiv,
    next_power_of_2,
    pdl_options,
    pdl_start,
    require_contiguous,
    round_to,
    to_e4m3,
    to_int8,
)


def store_kv_reference(
    heads: torch.Tensor,
    which: int,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
) -> None:
    """Write heads [T, HK, D] as the cache's keys (`which` = KEY) or values (VALUE), one scale per token and head."""
    present = slot_mapping >= 0
    slots = slot_mapping[present].long()
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    values = heads[present]
    if kv_scales is not None:
        limit = QUANTIZED_MAX[kv_cache.dtype]
        values = values.float()
        scale = values.abs().amax(-1).clamp_min(1e-12) / limit
        values = (values / scale.unsqueeze(-1)).clamp(-limit, limit)
        if kv_cache.dtype == torch.int8:
            values = values.round()
        kv_scales[page, :, which, offset] = scale
    stored = values.to(kv_cache.dtype)
    if stored.dtype == torch.float8_e4m3fn:  # copied as bytes: not every device indexes float8
        kv_cache, stored = kv_cache.view(torch.uint8), stored.view(torch.uint8)
    kv_cache[page, :, which, offset] = stored


def check_cache(kv_cache: torch.Tensor, kv_scales: Optional[torch.Tensor]) -> None:
    """Raise ValueError unless exactly a quantized cache has scales."""
    if (kv_cache.dtype in QUANTIZED_MAX) != (kv_scales is not None):
        raise ValueError(
            f"a {kv_cache.dtype} KV cache needs {'' if kv_cache.dtype in QUANTIZED_MAX else 'no '}kv_scales"
        )


def check_center(key_center: Optional[torch.Tensor], heads: int, width: int) -> None:
    """Raise ValueError unless key_center is fp32 [heads, width]."""
    if key_center is not None and (key_center.dtype != torch.float32 or tuple(key_center.shape) != (heads, width)):
        raise ValueError(f"key_center must be fp32 [{heads}, {width}], not {key_center.dtype} {list(key_center.shape)}")


def centered(k: torch.Tensor, key_center: Optional[torch.Tensor]) -> torch.Tensor:
    """Return k [T, HK, D] - key_center [HK, D] in fp32, or k itself without key_center."""
    check_center(key_center, k.shape[1], k.shape[2])
    return k if key_center is None else k.float() - key_center


def reference(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    key_center: Optional[torch.Tensor] = None,
) -> None:
    """Write k, v [T, HK, D] to kv_cache [NP, HK, 2, PAGE_SIZE, D] and kv_scales [NP, HK, 2, PAGE_SIZE], in place.

    slot_mapping [T] int32: a slot per token, -1 for padding; no two tokens of a call share a slot. An e4m3 or int8
    cache has scales (amax / 448 or amax / 127 per token and head; int8 rounds to nearest even), other caches have none.
    key_center [HK, D] fp32 is subtracted from k in fp32: a constant that all keys of a head share does not change
    softmax, but would enlarge their scales.
    """
    check_cache(kv_cache, kv_scales)
    store_kv_reference(centered(k, key_center), KEY, kv_cache, kv_scales, slot_mapping)
    store_kv_reference(v, VALUE, kv_cache, kv_scales, slot_mapping)


def fake(*_: Any) -> None:
    """Return nothing: the op only writes to the cache."""
    return None


@triton.jit
def store_heads(
    first, second, head, present, which, slot, kv_cache, kv_scales, HEADS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store heads [GROUP, D] (as fp32 halves; which: 0 keys, 1 values) of one token at its slot >= 0.

    LIMIT = 0: a cache without scales.
    """
    # the (page, head, K | V, token) of each head
    row = ((slot // PAGE * HEADS + head) * 2 + which) * PAGE + slot % PAGE
    if LIMIT > 0:
        amax = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        scale = tl.maximum(amax, 1e-12) / LIMIT
        tl.store(kv_scales + row, scale, mask=present)
        inverse = (1.0 / scale)[:, None]
        first *= inverse
        second *= inverse
    target = kv_cache + row[:, None] * D + tl.arange(0, D // 2)[None, :]
    tl.store(target, _to_cache(first, kv_cache.dtype.element_ty), mask=present[:, None])
    tl.store(target + D // 2, _to_cache(second, kv_cache.dtype.element_ty), mask=present[:, None])


@triton.jit
def _to_cache(values, dtype: tl.constexpr):
    """Convert scaled fp32 values to the cache's dtype."""
    if dtype == tl.float8e4nv:
        return to_e4m3(values)
    if dtype == tl.int8:
        return to_int8(values)
    return round_to(values, dtype)


@triton.jit
def _append_kernel(
    k, v, kv_cache, kv_scales, slot_mapping, key_center, k_token, k_head, v_token, v_head, HEADS: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, LIMIT: tl.constexpr, GROUP: tl.constexpr, CENTERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    which = tl.program_id(2)
    present = head < HEADS
    pdl_start(PDL)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        if which == 0:
            source = k + token * k_token + head[:, None] * k_head + tl.arange(0, D // 2)[None, :]
        else:
            source = v + token * v_token + head[:, None] * v_head + tl.arange(0, D // 2)[None, :]
        first = tl.load(source, mask=present[:, None], other=0.0).to(tl.float32)
        second = tl.load(source + D // 2, mask=present[:, None], other=0.0).to(tl.float32)
        if CENTERED:
            center = key_center + head[:, None] * D + tl.arange(0, D // 2)[None, :]
            is_key = (head < tl.where(which == 0, HEADS, 0))[:, None]
            first -= tl.load(center, mask=is_key, other=0.0)
            second -= tl.load(center + D // 2, mask=is_key, other=0.0)
        store_heads(first, second, head, present, which, slot, kv_cache, kv_scales, HEADS, D, PAGE, LIMIT)


def launch(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    key_center: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...] = (),
    sm_budget: Optional[int] = None,
    pdl: bool = False,
) -> None:
    """Write to the cache; k and v may have any strides over tokens and heads. Ignores `sm_budget`: a small launch."""
    check_cache(kv_cache, kv_scales)
    require_contiguous(
        "append_kv", kv_cache=kv_cache, kv_scales=kv_scales, slot_mapping=slot_mapping, key_center=key_center
    )
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(
            f"append_kv: the heads of k and v must be contiguous, not strided by {k.stride(-1)} and {v.stride(-1)}"
        )
    tokens, heads, width = k.shape
    check_center(key_center, heads, width)
    if tokens == 0:
        return
    group = min(next_power_of_2(heads), 4)
    _append_kernel[tokens, cdiv(heads, group), 2](
        k, v, kv_cache, kv_scales, slot_mapping, key_center, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=heads, D=width, PAGE=PAGE_SIZE, LIMIT=QUANTIZED_MAX.get(kv_cache.dtype, 0.0), GROUP=group,
        CENTERED=key_center is not None, num_warps=1, **pdl_options(pdl),
    )  # fmt: skip


append_kv = register("append_kv", reference, fake, launch, mutates=("kv_cache", "kv_scales"), family="rope")
