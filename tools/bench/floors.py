"""The lower bound of a decode step: the time to read its bytes at the memory's bandwidth."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...graphs.config import LlamaConfig

if TYPE_CHECKING:
    from ...compiler.cost.hardware import Gpu

ELEMENT_BYTES = {"int8": 1, "fp8": 1, "bf16": 2, "fp32": 4}  # by precision
SCALE_BYTES = 4


def chosen_experts(base: LlamaConfig, tokens: int | None) -> float:
    """Return the expected number of experts of a layer that independent `tokens` choose (None: all experts)."""
    if tokens is None or not base.num_experts:
        return base.num_experts
    return base.num_experts * (1 - (1 - base.num_experts_per_tok / base.num_experts) ** tokens)


def weight_bytes(config: Mapping[str, Any], precision: str, lm_head: str = "auto", tokens: int | None = None) -> float:
    """Return the bytes of the linear layers and the output projection, without norms and embedding rows.

    tokens  of a step, which choose the experts that it reads; None: all experts
    """
    width, base = ELEMENT_BYTES, LlamaConfig.from_dict(config)
    hidden, inner = base.hidden_size, base.expert_intermediate_size

    def linear(outputs: int, inputs: int) -> int:
        return inputs * outputs * width[precision] + (outputs * SCALE_BYTES if width[precision] == 1 else 0)

    experts = chosen_experts(base, tokens) * (linear(2 * inner, hidden) + linear(hidden, inner))
    router = base.num_experts * hidden * (4 if precision == "fp32" else 2)
    return (
        sum(linear(*base.stored_shape(module)) for module in base.stored_modules())
        + base.num_sparse_layers * (experts + router)
        + config["vocab_size"]
        * config["hidden_size"]
        * width[lm_head if lm_head != "auto" and width[precision] == 1 else precision]
    )


def kv_element_bytes(precision: str, kv_cache_dtype: str) -> int:
    """Return the bytes of one element of the KV cache."""
    if kv_cache_dtype == "auto":
        return ELEMENT_BYTES[precision]
    return 2 if kv_cache_dtype == "bf16" else 1


def kv_bytes_per_token(config: Mapping[str, Any], element_bytes: int) -> int:
    """Return the bytes of one token's keys and values in all layers, without the scales of 8-bit caches."""
    base = LlamaConfig.from_dict(config)
    return base.num_hidden_layers * 2 * base.num_key_value_heads * base.stored_head_dim * element_bytes


def adapter_bytes(config: Mapping[str, Any], rank: int, element_bytes: int = 2, tokens: int | None = None) -> float:
    """Return the bytes of one adapter of `rank` on all projections and experts in its slot.

    tokens  that use it in a step, and choose the experts that it reads; None: all experts
    """
    base = LlamaConfig.from_dict(config)
    total: float = sum(map(sum, map(base.stored_shape, base.stored_modules())))
    per_expert = 3 * (base.hidden_size + base.expert_intermediate_size)  # gate and up have an A each
    total += base.num_sparse_layers * chosen_experts(base, tokens) * per_expert
    return rank * total * element_bytes


def decode_floor_ms(
    weights: float, kv_per_token: float, context_tokens: float, adapters: float, bandwidth: float, gpus: int = 1
) -> float:
    """Return the milliseconds of a decode step that reads all weights, cached tokens and active adapters once.

    context_tokens  of all sequences
    bandwidth       bytes per second of each of `gpus` GPUs
    """
    return 1e3 * (weights + kv_per_token * context_tokens + adapters) / (bandwidth * gpus)


def gpu_under(llm: Any) -> "Gpu":
    """Return the figures of an engine's GPU; on a CPU those of this machine's GPU, or of an assumed one."""
    from ...compiler.cost.hardware import gpu_here, gpu_of

    return gpu_of(llm.device) if llm.device.type == "cuda" else gpu_here()


def floor_note(gpu: "Gpu", on_gpu: bool, gpus: int) -> str:
    """Return the line under the table that names the floor's GPU and bandwidth."""
    if not on_gpu:
        return f"floor: none on a CPU; the JSON has that of {gpu.describe_bandwidth()}"
    shared = f", a part on each of {gpus} GPUs" if gpus > 1 else ""
    return f"floor: weights + KV cache + active adapters, read once at {gpu.describe_bandwidth()}{shared}"
