"""Simulated error of attention with a quantized KV cache, for one layer and one sequence.

Queries [T, HQ, D] and keys [T, HK, D] are those after RoPE, values [T, HK, D]; attention is causal.
"""

from typing import Any

import torch

from ...ops.attention.append_kv import store_kv_reference
from ...ops.core.kv_layout import KEY, PAGE_SIZE, kv_cache_shape, kv_scales_shape
from ...ops.elementwise.hadamard import reference as hadamard_reference

CACHES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def stored(heads: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Return heads [T, H, D] in fp32 as read from a cache of `kv_dtype`, with one scale per token and head."""
    tokens, count, width = heads.shape
    pages = -(-tokens // PAGE_SIZE)
    cache = torch.zeros(kv_cache_shape(pages, count, width), dtype=torch.uint8, device=heads.device).view(
        CACHES[kv_dtype]
    )
    scales = torch.zeros(kv_scales_shape(pages, count), device=heads.device)
    store_kv_reference(heads.float(), KEY, cache, scales, torch.arange(tokens, dtype=torch.int32, device=heads.device))
    values = cache[:, :, KEY].float() * scales[:, :, KEY].unsqueeze(-1)
    return values.transpose(1, 2).reshape(-1, count, width)[:tokens]


def score_variance(
    q: torch.Tensor,
    k: torch.Tensor,
    softmax_scale: float,
    kv_dtype: str,
    *,
    hadamard: bool = False,
    center: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> float:
    """Return the variance of the score errors under the attention weights, in nats squared, averaged over queries and
    heads.

    An error that all keys of a query share has no effect on softmax. To first order half the variance is the KL
    divergence from the attention without quantization. With e4m3 the queries are quantized too, as in prefill.

    center   [HK, D], subtracted from k before it is stored, without Hadamard
    weights  `attention_weights(q, k, softmax_scale)`, if already computed
    """
    q, k = q.float(), k.float()
    exact = _scores(q, k, softmax_scale)
    weights = attention_weights(q, k, softmax_scale) if weights is None else weights
    if center is not None:
        k = k - center
    if hadamard:
        q, k = hadamard_reference(q), hadamard_reference(k)
    error = _scores(stored(q, kv_dtype) if kv_dtype == "fp8_e4m3" else q, stored(k, kv_dtype), softmax_scale) - exact
    mean = (weights * error).sum(-1, keepdim=True)
    return float((weights * (error - mean).square()).sum(-1).mean())


def value_error(v: torch.Tensor, weights: torch.Tensor, kv_dtype: str, *, rotated: bool = False) -> tuple[float, float]:
    """Return (sum of squared errors, sum of squares) of attention's output [T, HQ, D] with v stored in `kv_dtype`."""
    v = v.float()
    cached = hadamard_reference(v) if rotated else v
    difference = _outputs(weights, stored(cached, kv_dtype) - cached)
    return float(difference.square().sum()), float(_outputs(weights, v).square().sum())


def attention_weights(q: torch.Tensor, k: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Return the causal softmax(q k^T * softmax_scale) [HK, HQ / HK, T, T]."""
    scores = _scores(q.float(), k.float(), softmax_scale)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def outliers(heads: torch.Tensor) -> float:
    """Return the mean of amax / rms over tokens and heads: 1 for equal magnitudes, sqrt(D) for a single channel."""
    heads = heads.float()
    return float((heads.abs().amax(-1) / heads.square().mean(-1).sqrt().clamp_min(1e-12)).mean())


def _scores(q: torch.Tensor, k: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    groups: Any = q.unflatten(1, (k.shape[1], -1))
    return torch.einsum("thgd,shd->hgts", groups, k) * softmax_scale


def _outputs(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("hgts,shd->thgd", weights, v)
