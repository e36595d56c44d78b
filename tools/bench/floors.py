"""The memory-bandwidth floor of a decode step: no engine can step faster than the bytes that it must read take to
arrive.
"""

from collections.abc import Mapping, Sequence
from typing import Any

BANDWIDTH = 4.68e12
"""Bytes a second that an H200 reads in practice."""

ELEMENT_BYTES = {"int8": 1, "fp8": 1, "bf16": 2, "fp32": 4}  # by precision
SCALE_BYTES = 4


def projection_widths(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a decoder layer's seven linear projections, from the fields of config.json."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    query, key = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    return {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key),
        "v_proj": (hidden, key),
        "o_proj": (query, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def weight_bytes(config: Mapping[str, Any], precision: str, lm_head: str = "auto") -> int:
    """Bytes of the linear layers and of the output projection; norms and the few embedding rows are left out."""
    width = ELEMENT_BYTES
    layer = sum(
        inputs * outputs * width[precision] + (outputs * SCALE_BYTES if width[precision] == 1 else 0)
        for inputs, outputs in projection_widths(config).values()
    )
    return (
        config["num_hidden_layers"] * layer
        + config["vocab_size"]
        * config["hidden_size"]
        * width[lm_head if lm_head != "auto" and width[precision] == 1 else precision]
    )


def kv_bytes_per_token(config: Mapping[str, Any], element_bytes: int) -> int:
    """Bytes of one token's keys and values in all layers, the scales of 8-bit caches left out."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return config["num_hidden_layers"] * 2 * config.get("num_key_value_heads", heads) * head_dim * element_bytes


def adapter_bytes(
    config: Mapping[str, Any], rank: int, targets: Sequence[str] | None = None, element_bytes: int = 2
) -> int:
    """Bytes of one adapter of `rank` on `targets` (None: all seven projections)."""
    widths = projection_widths(config)
    return config["num_hidden_layers"] * sum(
        rank * (inputs + outputs) * element_bytes
        for name, (inputs, outputs) in widths.items()
        if targets is None or name in targets
    )


def decode_floor_ms(
    weights: float, kv_per_token: float, context_tokens: float, adapters: float, gpus: int = 1
) -> float:
    """Milliseconds of a decode step that reads all weights, `context_tokens` cached tokens (all sequences together)
    and the active adapters' bytes, divided over so many GPUs.
    """
    return 1e3 * (weights + kv_per_token * context_tokens + adapters) / (BANDWIDTH * gpus)
