"""Causal attention over the paged KV cache: decode steps, also with drafts, prefill chunks, and mixed batches.

`paged_attention` returns the model's dtype; `paged_attention_quant` adds the rowwise e4m3 or int8 form that the o
projection reads. This file has the specification and chooses a kernel:
  decode_gluon.py   decode, head_dim 128, at most 8 query heads per KV head, e4m3, int8 or bf16 cache
  decode.py         other decode steps; both also with at most `rows` rows per sequence
  prefill_gluon.py  chunks, head_dim 128, 1 to 32 query heads per KV head (powers of two), e4m3 or int8 cache; without
                    a window it splits long contexts of few tiles
  prefill_wide_gluon.py  the same for sequences that widen_kv has converted to fp16
  prefill.py        everything else
All but prefill_wide_gluon support windows; without a window (0) they compile to the same code as without that support.

Requirements on the cache: its memory was zeroed at allocation, so values after a sequence's end are finite; the scales
of V stay below 255 (a token's largest |V| below 114000 in e4m3; prefill_gluon clamps scales at a largest |V| of 4090).
"""

import math
from typing import Any, Optional

import torch

from ..core.device import workspace
from ..core.dtypes import QUANTIZED_MAX
from ..core.kv_layout import KEY, PAGE_SIZE, VALUE
from ..core.registry import register
from ..core.reproducible_sums import LOG2_E, power_of_two, product, sum_in_order
from ..core.triton_support import cdiv
from ..elementwise.quantize import E4M3
from ..elementwise.quantize import fake as quantize_rowwise_fake
from ..elementwise.quantize import launch as quantize_rowwise_launch
from ..elementwise.quantize import reference as quantize_rowwise_reference
from . import decode as attention_decode
from . import prefill as attention_prefill
from . import prefill_gluon
from .decode_gluon import COLUMNS
from .widen_kv import STEP_TOKENS

HEAD_DIMS = (64, 128)


def check_arguments(
    q: torch.Tensor, kv_cache: torch.Tensor, kv_scales: Optional[torch.Tensor], window: int = 0
) -> None:
    """Raise ValueError, naming the argument, if shapes or dtypes do not match or the window is negative."""
    if window < 0:
        raise ValueError(f"window must be a number of tokens, or 0 for no window, not {window}")
    heads, dim = q.shape[1:]
    kv_heads, cached_dim = kv_cache.shape[1], kv_cache.shape[4]
    if kv_cache.shape[2:4] != (2, PAGE_SIZE) or cached_dim != dim:
        raise ValueError(
            f"kv_cache must be [pages, kv heads, 2, {PAGE_SIZE}, {dim}] for q with head_dim {dim}, got "
            f"{tuple(kv_cache.shape)}"
        )
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads; it must be a multiple of the cache's {kv_heads} kv heads")
    if (kv_cache.dtype in QUANTIZED_MAX) != (kv_scales is not None):
        raise ValueError(f"kv_scales must be given exactly when the cache is quantized; the cache is {kv_cache.dtype}")


def check_rows(q: torch.Tensor, context_lens: torch.Tensor, rows: int) -> None:
    """Raise ValueError unless q has `rows` rows per sequence (0: any number)."""
    if rows and q.shape[0] != rows * context_lens.shape[0]:
        raise ValueError(
            f"q has {q.shape[0]} rows; with rows={rows} and {context_lens.shape[0]} sequences it must have "
            f"{rows * context_lens.shape[0]}"
        )


def check_widened(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    decode: bool,
    wide: Optional[torch.Tensor],
    plan: Optional[torch.Tensor],
    window: int,
) -> None:
    """Raise ValueError unless `wide` and `plan` are both None or both match this cache and batch."""
    if wide is None and plan is None:
        return
    if wide is None or plan is None:
        raise ValueError(f"wide and plan must be given together; {'wide' if wide is None else 'plan'} is missing")
    if window:
        raise ValueError(f"wide does not support windows, got a window of {window} tokens")
    (_, heads, dim), kv_heads = q.shape, kv_cache.shape[1]
    if decode or kv_cache.dtype != torch.int8 or not prefill_gluon.takes_heads(heads, kv_heads, dim):
        raise ValueError(
            "wide needs chunks over an int8 cache with head_dim 128 and 1 to 32 query heads per KV head (a power of "
            "two), not "
            f"{'decode over ' if decode else ''}{kv_cache.dtype}, head_dim {dim} and {heads} heads on {kv_heads}"
        )
    if (
        wide.dtype != torch.float16
        or tuple(wide.shape[1:]) != (kv_heads, 2, STEP_TOKENS, dim)
        or plan.shape != (3, block_table.shape[0] + 1)
    ):
        raise ValueError(
            f"wide is {wide.dtype} {tuple(wide.shape)} and plan {tuple(plan.shape)}; with this cache and batch "
            "they must be torch.float16 "
            f"[steps, {kv_heads}, 2, {STEP_TOKENS}, {dim}] and {(3, block_table.shape[0] + 1)}"
        )


def check_prefix(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    decode: bool,
    window: int,
    *given: Optional[torch.Tensor],
) -> Optional[tuple[torch.Tensor, ...]]:
    """Return prefix, prefix_lse and prefix_plan if given. Raises ValueError unless they match this cache and batch."""
    shared = tuple(each for each in given if each is not None)
    if not shared:
        return None
    if len(shared) < len(given):
        raise ValueError("prefix, prefix_lse and prefix_plan must be given together")
    sequences, heads, dim = q.shape
    if window or not decode or not takes_prefix(heads, kv_cache.shape[1], dim, kv_cache.dtype):
        raise ValueError(
            "a prefix needs decode over an 8-bit cache with head_dim 128 and 1, 2, 4 or 8 query heads per KV head, "
            f"without a window; got decode={decode}, {kv_cache.dtype}, head_dim {dim}, {heads} heads on "
            f"{kv_cache.shape[1]}, window={window}"
        )
    parts, shapes = shared[0].shape[0], [tuple(each.shape) for each in shared]
    if shapes != (wanted := [(parts, sequences, heads, dim), (parts, sequences, heads), (3, sequences)]):
        raise ValueError(
            f"prefix, prefix_lse and prefix_plan are {shapes}; with this q and {parts} parts they must be {wanted}"
        )
    return shared


def takes_prefix(heads: int, kv_heads: int, dim: int, cache: torch.dtype) -> bool:
    """Return whether the kernels of shared prefixes support these heads and this cache."""
    group = heads // kv_heads
    return prefill_gluon.takes_heads(heads, kv_heads, dim) and group <= COLUMNS[0] and cache in QUANTIZED_MAX


def gather_keys_values(
    kv_cache: torch.Tensor, kv_scales: Optional[torch.Tensor], pages: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `length` keys and values of a sequence with these pages, in fp32: [HK, length, D] each."""
    kv_heads, dim = kv_cache.shape[1], kv_cache.shape[4]
    stored = kv_cache.view(torch.uint8).index_select(0, pages).view(kv_cache.dtype).float()
    if kv_scales is not None:
        stored = stored * kv_scales.index_select(0, pages)[..., None]
    in_order = stored.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :length]
    return in_order[KEY], in_order[VALUE]


def hidden_keys(position: torch.Tensor, context: int, window: int) -> torch.Tensor:
    """Return a mask [rows, context] bool of the keys that rows at positions [rows] do not see."""
    key = torch.arange(context, device=position.device)[None, :]
    hidden = key > position[:, None]
    return hidden | (key <= position[:, None] - window) if window else hidden


def paged_attention_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    quantize_q: bool,
    decode: bool,
    wide: Optional[torch.Tensor] = None,
    plan: Optional[torch.Tensor] = None,
    window: int = 0,
    rows: int = 0,
    exact: bool = False,
    prefix: Optional[torch.Tensor] = None,
    prefix_lse: Optional[torch.Tensor] = None,
    prefix_plan: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Attend from each sequence's newest tokens to all of its cached tokens, including themselves.

    q             [T, HQ, D]; sequence b has rows query_start[b]..query_start[b + 1]: the last of its cached tokens
    kv_cache      [NP, HK, 2, 64, D]; e4m3 and int8 caches have kv_scales [NP, HK, 2, 64] fp32
    block_table   [B, P], context_lens [B], query_start [B + 1]: int32
    quantize_q    round q to e4m3 per token and head; only for an e4m3 cache and with `decode` off
    decode        every sequence has one row (T == B)
    wide, plan    results of `widen_kv` and `widen_plan` for the same cache and batch: a faster path to the same result,
                  for chunks over an int8 cache that the Gluon kernels support
    window        0: none; else position p sees keys with p - window < position <= p, as in transformers, and older
                  pages are not read
    rows          > 0: every sequence has at most that many rows (T == B * rows; steps with drafts)
    exact         a row's bits do not depend on the other sequences, also on a GPU. Those of chunks never do
    prefix, prefix_lse, prefix_plan
                  results of `prefix_attention` and `prefix_plan` for the same q, cache and batch, with `decode`: a
                  faster path to the same result for sequences that share pages

    Scores are rounded to fp32, the rest is fp64 with the sums of `core/reproducible_sums.py`: a row's result does not
    depend on the size of its chunk. Returns [T, HQ * D] in q's dtype; rows after query_start[B] and those of a sequence
    with context_len 0 are zero.
    """
    check_arguments(q, kv_cache, kv_scales, window)
    check_widened(q, kv_cache, block_table, decode or rows > 0, wide, plan, window)
    check_rows(q, context_lens, rows)
    check_prefix(q, kv_cache, decode, window, prefix, prefix_lse, prefix_plan)
    tokens, heads, dim = q.shape
    kv_heads = kv_cache.shape[1]
    if quantize_q and not decode and kv_cache.dtype == torch.float8_e4m3fn:
        rounded, scale = quantize_rowwise_reference(q)
        queries = rounded.float() * scale[..., None]
    else:
        queries = q.float()
    out = q.new_zeros(tokens, heads, dim)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for sequence, context in enumerate(contexts):
        first, last = starts[sequence], starts[sequence + 1]
        if context == 0 or first == last:
            continue
        count = last - first
        keys, values = gather_keys_values(
            kv_cache, kv_scales, block_table[sequence, : cdiv(context, PAGE_SIZE)].long(), context
        )
        query = queries[first:last].view(count, kv_heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)
        position = torch.arange(context - count, context, device=q.device)
        hidden = hidden_keys(position, context, window).repeat(heads // kv_heads, 1)
        # scale in log2 units: sums of 16-bit products without a factor are often halfway between two fp32 numbers
        scores = product(query, keys, torch.float32, divisor=1 / (softmax_scale * LOG2_E)).masked_fill_(
            hidden, -math.inf
        )
        weights = power_of_two(scores - scores.amax(-1, keepdim=True)).masked_fill_(hidden, 0.0)
        attended = product(weights, values.mT, q.dtype, divisor=sum_in_order(weights))
        out[first:last] = attended.view(kv_heads, -1, count, dim).permute(2, 0, 1, 3).reshape(count, heads, dim)
    return out.view(tokens, heads * dim)


def paged_attention_fake(q: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result."""
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def paged_attention_quant_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    quantize_q: bool,
    decode: bool,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    wide: Optional[torch.Tensor] = None,
    plan: Optional[torch.Tensor] = None,
    window: int = 0,
    rows: int = 0,
    exact: bool = False,
    prefix: Optional[torch.Tensor] = None,
    prefix_lse: Optional[torch.Tensor] = None,
    prefix_plan: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply `paged_attention`, then quantize the rounded result rowwise.

    Returns (o, q, scale): o in q's dtype, [T, HQ * D] or [0, HQ * D] when `keep` is off; q and scale as in
    `quantize_rowwise`.
    """
    o = paged_attention_reference(
        q,
        kv_cache,
        kv_scales,
        block_table,
        context_lens,
        query_start,
        softmax_scale,
        quantize_q,
        decode,
        wide,
        plan,
        window,
        rows,
        exact,
        prefix,
        prefix_lse,
        prefix_plan,
    )
    quantized, scale = quantize_rowwise_reference(o, dtype, rotate)
    return o if keep else o.new_empty(0, o.shape[1]), quantized, scale


def paged_attention_quant_fake(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    quantize_q: bool,
    decode: bool,
    keep: bool,
    dtype: torch.dtype = E4M3,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty results."""
    tokens, width = q.shape[0], q.shape[1] * q.shape[2]
    return q.new_empty(tokens if keep else 0, width), *quantize_rowwise_fake(q.flatten(1), dtype)


def paged_attention_launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    quantize_q: bool,
    decode: bool,
    wide: Optional[torch.Tensor] = None,
    plan: Optional[torch.Tensor] = None,
    window: int = 0,
    rows: int = 0,
    exact: bool = False,
    prefix: Optional[torch.Tensor] = None,
    prefix_lse: Optional[torch.Tensor] = None,
    prefix_plan: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (result,). Ignores `sm_budget`: attention runs on the main lane and uses the whole GPU.

    With `pdl`, block_table, context_lens and query_start must not be written by the kernel just before this one.
    """
    check_arguments(q, kv_cache, kv_scales, window)
    check_widened(q, kv_cache, block_table, decode or rows > 0, wide, plan, window)
    check_rows(q, context_lens, rows)
    shared = check_prefix(q, kv_cache, decode, window, prefix, prefix_lse, prefix_plan)
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"attention kernels support head_dim {HEAD_DIMS}, not {q.shape[2]}; run the reference on the CPU instead"
        )
    if q.shape[0] == 0:
        return
    if decode or (rows and not quantize_q and attention_decode.takes_rows(q, kv_cache, rows)):
        attention_decode.launch(
            q,
            kv_cache,
            kv_scales,
            block_table,
            context_lens,
            softmax_scale,
            out[0],
            pdl,
            window,
            query_start,
            1 if decode else rows,
            exact,
            shared,
        )
    else:
        attention_prefill.launch(
            q,
            kv_cache,
            kv_scales,
            block_table,
            context_lens,
            query_start,
            softmax_scale,
            quantize_q,
            out[0],
            pdl,
            wide,
            plan,
            window,
            exact,
        )


def paged_attention_quant_launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    quantize_q: bool,
    decode: bool,
    keep: bool,
    dtype: torch.dtype = E4M3,
    rotate: int = 0,
    wide: Optional[torch.Tensor] = None,
    plan: Optional[torch.Tensor] = None,
    window: int = 0,
    rows: int = 0,
    exact: bool = False,
    prefix: Optional[torch.Tensor] = None,
    prefix_lse: Optional[torch.Tensor] = None,
    prefix_plan: Optional[torch.Tensor] = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (o, quantized, scale). Without `keep` the 16-bit rows are written to a workspace."""
    o, quantized, scale = out
    tokens, width = quantized.shape
    if tokens == 0:
        return
    if not keep:
        nbytes = tokens * width * q.element_size()
        o = workspace(q.device, "paged_attention_quant", nbytes)[:nbytes].view(q.dtype).view(tokens, width)
    paged_attention_launch(
        q, kv_cache, kv_scales, block_table, context_lens, query_start, softmax_scale, quantize_q, decode, wide, plan,
        window, rows, exact, prefix, prefix_lse, prefix_plan, out=(o,), pdl=pdl,
    )  # fmt: skip
    quantize_rowwise_launch(o, dtype, rotate, out=(quantized, scale), sm_budget=sm_budget, pdl=pdl)


paged_attention = register(
    "paged_attention",
    paged_attention_reference,
    paged_attention_fake,
    paged_attention_launch,
    kind="attention",
    family="attention",
)
paged_attention_quant = register(
    "paged_attention_quant",
    paged_attention_quant_reference,
    paged_attention_quant_fake,
    paged_attention_quant_launch,
    kind="attention",
    family="attention",
)
