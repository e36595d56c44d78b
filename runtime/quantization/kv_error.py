"""What a quantized KV cache does to attention: simulated for one layer and one sequence with the layer's own queries,
keys and values.

Queries [T, HQ, D] and keys [T, HK, D] are those after RoPE, values [T, HK, D]; row t is token t, attention is causal.
"""

from typing import Any

import torch

from ...ops.attention.append_kv import store_kv_reference
from ...ops.core.kv_layout import KEY, PAGE_SIZE, kv_cache_shape, kv_scales_shape
from ...ops.elementwise.hadamard import reference as hadamard_reference

CACHES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def stored(heads: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """heads [T, H, D] as they come back, in fp32, from a cache of `kv_dtype` with one scale per token and head."""
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
    """Mean over queries and heads of the variance, under the attention weights, of the error of the scores (in nats
    squared).

    What all keys of a query have in common drops out, as it does in softmax; half the variance is, to first order, the
    KL divergence between the attention with and without quantization. With e4m3 the queries are quantized too, as in
    prefill. `center` [HK, D]: subtracted from k before it is stored, given without Hadamard. `weights`:
    `attention_weights(q, k, softmax_scale)` if they are at hand.
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
    """(sum of the squared errors, sum of squares) of attention's output [T, HQ, D] when v is stored in `kv_dtype`,
    each head rotated or not.
    """
    v = v.float()
    seen = hadamard_reference(v) if rotated else v
    difference = _outputs(weights, stored(seen, kv_dtype) - seen)
    return float(difference.square().sum()), float(_outputs(weights, v).square().sum())


def attention_weights(q: torch.Tensor, k: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Causal softmax(q k^T * softmax_scale) [HK, HQ / HK, T, T]."""
    scores = _scores(q.float(), k.float(), softmax_scale)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def outliers(heads: torch.Tensor) -> float:
    """Mean over tokens and heads of amax / rms: 1 for equal magnitudes, sqrt(D) for a single channel."""
    heads = heads.float()
    return float((heads.abs().amax(-1) / heads.square().mean(-1).sqrt().clamp_min(1e-12)).mean())


def _scores(q: torch.Tensor, k: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    groups: Any = q.unflatten(1, (k.shape[1], -1))
    return torch.einsum("thgd,shd->hgts", groups, k) * softmax_scale


def _outputs(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("hgts,shd->thgd", weights, v)
