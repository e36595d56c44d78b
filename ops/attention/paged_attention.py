"""Causal attention over the paged KV cache: decode steps, with drafts too, prefill chunks with history, and batches of
both.

`paged_attention` gives the model's dtype; `paged_attention_quant` adds the rowwise e4m3 or int8 form that the o
projection reads. This file holds the specification and picks a kernel:
  decode_gluon.py   decode, head_dim 128, at most 8 query heads a KV head, e4m3, int8 or bf16 cache
  decode.py         every other decode; both also where sequences have a few rows each, at most `rows`
  prefill_gluon.py  chunks, head_dim 128, a power of two of query heads a KV head, at most 32, e4m3 or int8 cache
  prefill_wide_gluon.py  of these, what widen_kv has made fp16
  prefill.py        everything else
All but prefill_wide_gluon know windows; without one (0) their code is what it would be if they did not.

Contract on the cache: the memory was zeroed once when it was allocated, so that what lies after a sequence's end is
finite; the scales of V stay below 255 (a token's largest |V| below 114000 in e4m3; where prefill_gluon reads them,
scales end at a largest |V| of 4090).
"""

import math
from typing import Optional

import torch

from ..core.eight_bits import QUANTIZED_MAX
from ..core.kv_layout import KEY, PAGE_SIZE, VALUE
from ..core.registry import register
from ..core.reproducible import LOG2_E, power_of_two, product, sum_in_order
from ..core.triton_support import cdiv
from ..core.workspace import workspace
from ..elementwise.quantize import E4M3
from ..elementwise.quantize import fake as quantize_rowwise_fake
from ..elementwise.quantize import launch as quantize_rowwise_launch
from ..elementwise.quantize import reference as quantize_rowwise_reference
from . import decode as attention_decode
from . import prefill as attention_prefill
from . import prefill_gluon
from .widen_kv import STEP_TOKENS

HEAD_DIMS = (64, 128)


def check_arguments(
    q: torch.Tensor, kv_cache: torch.Tensor, kv_scales: Optional[torch.Tensor], window: int = 0
) -> None:
    """ValueError, naming the argument, if the shapes or dtypes do not belong together or the window is negative."""
    if window < 0:
        raise ValueError(f"window must be a number of tokens, or 0 for attention to whole contexts, got {window}")
    heads, dim = q.shape[1:]
    kv_heads, cached_dim = kv_cache.shape[1], kv_cache.shape[4]
    if kv_cache.shape[2:4] != (2, PAGE_SIZE) or cached_dim != dim:
        raise ValueError(
            f"kv_cache must be [pages, kv heads, 2, {PAGE_SIZE}, {dim}] for q with head_dim {dim}, got "
            f"{tuple(kv_cache.shape)}"
        )
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is no multiple of the cache's {kv_heads} kv heads")
    if (kv_cache.dtype in QUANTIZED_MAX) != (kv_scales is not None):
        raise ValueError(f"kv_scales must be given exactly when the cache is quantized; the cache is {kv_cache.dtype}")


def check_rows(q: torch.Tensor, context_lens: torch.Tensor, rows: int) -> None:
    """ValueError if there are other than `rows` rows of q for each sequence."""
    if rows and q.shape[0] != rows * context_lens.shape[0]:
        raise ValueError(
            f"q has {q.shape[0]} rows, and rows={rows} for each of {context_lens.shape[0]} sequences make "
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
    """ValueError if there is one of `wide` and `plan` without the other, or where nothing reads them, or they do not
    belong to this cache and batch.
    """
    if wide is None and plan is None:
        return
    if wide is None or plan is None:
        raise ValueError(f"wide and plan belong together; {'wide' if wide is None else 'plan'} is missing")
    if window:
        raise ValueError(f"wide is for attention to whole contexts, not to a window of {window} tokens")
    (_, heads, dim), kv_heads = q.shape, kv_cache.shape[1]
    if decode or kv_cache.dtype != torch.int8 or not prefill_gluon.takes_heads(heads, kv_heads, dim):
        raise ValueError(
            "wide is for chunks over an int8 cache with head_dim 128 and a power of two of query heads a KV head, "
            "at most 32, not for "
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


def gather_keys_values(
    kv_cache: torch.Tensor, kv_scales: Optional[torch.Tensor], pages: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys and values of a sequence that owns `pages`, dequantized: fp32, [HK, length, D] each."""
    kv_heads, dim = kv_cache.shape[1], kv_cache.shape[4]
    stored = kv_cache.view(torch.uint8).index_select(0, pages).view(kv_cache.dtype).float()
    if kv_scales is not None:
        stored = stored * kv_scales.index_select(0, pages)[..., None]
    in_order = stored.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :length]
    return in_order[KEY], in_order[VALUE]


def hidden_keys(position: torch.Tensor, context: int, window: int) -> torch.Tensor:
    """[rows, context] bool: which of a sequence's `context` keys rows at these positions ([rows]) do not see."""
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
) -> torch.Tensor:
    """Attention of each sequence's newest tokens over all of its cached tokens, themselves included.

    q [T, HQ, D]; kv_cache [NP, HK, 2, 64, D] with kv_scales [NP, HK, 2, 64] fp32 with an e4m3 or int8 cache;
    block_table [B, P], context_lens [B] and query_start [B + 1] int32. Sequence b owns the rows
    query_start[b]..query_start[b + 1] of q: the last tokens of its context_lens[b] cached ones (already appended), so a
    row sees the cache up to its own position, itself included: with a `window` (0: none) the last `window` tokens of
    that, so that position p sees the keys with p - window < position <= p, as transformers' sliding windows do; what
    lies before is not read. `decode` promises one row a sequence (T == B), and `rows` > 0 at most so many (T == B *
    rows; the steps with drafts). `quantize_q` rounds q to
    e4m3 per token and head where the cache is e4m3 and `decode` is off; it is ignored elsewhere. `wide`, `plan`: what
    `widen_kv` and `widen_plan` make of the same cache and batch; the result is the same, and sooner there. Only where
    chunks are served by the Gluon kernels from an int8 cache.
    Scores are rounded to fp32, the rest is fp64; sums are `core/reproducible.py`'s, so that the result of a row does
    not depend on how many rows its chunk has.
    Returns [T, HQ * D] in q's dtype; rows after query_start[B] and those of a sequence with context_len 0 are zero.
    """
    check_arguments(q, kv_cache, kv_scales, window)
    check_widened(q, kv_cache, block_table, decode or rows > 0, wide, plan, window)
    check_rows(q, context_lens, rows)
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
        # as exponents of two: before this division many sums of 16-bit products lie halfway between two fp32 numbers
        scores = product(query, keys, torch.float32, divisor=1 / (softmax_scale * LOG2_E)).masked_fill_(
            hidden, -math.inf
        )
        weights = power_of_two(scores - scores.amax(-1, keepdim=True)).masked_fill_(hidden, 0.0)
        attended = product(weights, values.mT, q.dtype, divisor=sum_in_order(weights))
        out[first:last] = attended.view(kv_heads, -1, count, dim).permute(2, 0, 1, 3).reshape(count, heads, dim)
    return out.view(tokens, heads * dim)


def paged_attention_fake(
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
) -> torch.Tensor:
    """An empty result."""
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`paged_attention`, then rowwise quantization of the rounded result.

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
    rotate: int = 0,
    wide: Optional[torch.Tensor] = None,
    plan: Optional[torch.Tensor] = None,
    window: int = 0,
    rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty results."""
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
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (result,). `sm_budget` is accepted and not used: attention runs on the main lane and takes the whole
    GPU.

    With `pdl`, block_table, context_lens and query_start must be older than the kernel just before this one.
    """
    check_arguments(q, kv_cache, kv_scales, window)
    check_widened(q, kv_cache, block_table, decode or rows > 0, wide, plan, window)
    check_rows(q, context_lens, rows)
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(
            f"the attention kernels know head_dim {HEAD_DIMS}, not {q.shape[2]}; run the reference on the CPU instead"
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
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (o, quantized, scale); as `launch` otherwise. Without `keep` the 16-bit rows stay in a workspace."""
    o, quantized, scale = out
    tokens, width = quantized.shape
    if tokens == 0:
        return
    if not keep:
        nbytes = tokens * width * q.element_size()
        o = workspace(q.device, "paged_attention_quant", nbytes)[:nbytes].view(q.dtype).view(tokens, width)
    paged_attention_launch(
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
        out=(o,),
        pdl=pdl,
    )
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
