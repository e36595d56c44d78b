"""Supported families of models, by the architecture in config.json, and their differences from Llama.

A family maps config.json's fields to changed fields of LlamaConfig. All others are refused, common ones with a reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config_fields import ConfigError, flag, integer, number

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = ("gate_proj", "up_proj", "down_proj")
VOCABULARY_MODULES = ("model.embed_tokens", "lm_head")
"""Full names of the embedding and the output head."""
VOCABULARY_TARGETS = ("embed_tokens", "lm_head")
EXPERT_TARGETS = ("router", "experts_gate_up", "experts_down")
"""LoRA targets of a sparse layer: its router, and its experts' linears."""
ADAPTER_PARTS = ("dora", "bias")
"""What an adapter may have besides LoRA: magnitudes of DoRA; biases, of B or trained ones of the base."""

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One architecture.

    model_type      as config.json spells it
    served          well-known models
    differences     function from config.json's fields to the LlamaConfig fields that differ from a plain Llama
    defaults        values of missing fields in transformers, if they differ from Llama's
    partial_rotary  RoPE may rotate a part of each head
    """

    model_type: str
    served: str
    differences: Callable[[Fields], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: bool = False


PACKED_MODULES = {"qkv_proj": ATTENTION_MODULES[:3], "gate_up_proj": MLP_MODULES[:2]}
"""Projections that a checkpoint may store in one tensor, concatenated along the rows."""


def _biases(fields: Fields) -> tuple[str, ...]:
    """Return the projections with a bias, from the flags attention_bias and mlp_bias."""
    attention = ATTENTION_MODULES if flag(fields, "attention_bias") else ()
    return (*attention, *(MLP_MODULES if flag(fields, "mlp_bias") else ()))


def _window(fields: Fields) -> dict[str, Any]:
    """Return the sliding window, which applies to every layer; None without one."""
    return {"sliding_window": None if fields.get("sliding_window") is None else integer(fields, "sliding_window")}


def _phi3(fields: Fields) -> dict[str, Any]:
    return {"packed_checkpoint": True, **_window(fields)}


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {"biases": ATTENTION_MODULES[:3], **_window_of_late_layers(fields)}


def _qwen3(fields: Fields) -> dict[str, Any]:
    return {"biases": _biases(fields), "head_norms": True, **_window_of_late_layers(fields)}


def _smollm3(fields: Fields) -> dict[str, Any]:
    layers = range(integer(fields, "num_hidden_layers"))
    marks = fields.get("no_rope_layers")
    if marks is None:
        interval = integer(fields, "no_rope_layer_interval", 4)
        marks = [int((layer + 1) % interval != 0) for layer in layers]
    if not isinstance(marks, list) or len(marks) != len(layers) or not all(mark in (0, 1) for mark in marks):
        raise ConfigError("no_rope_layers must hold a 0 or a 1 for each layer: correct config.json")
    unrotated = tuple(layer for layer, mark in enumerate(marks) if not mark)
    return {"biases": _biases(fields), "unrotated_layers": unrotated, **_switched_window(fields, unrotated)}


def _granite(fields: Fields) -> dict[str, Any]:
    names = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
    return {"biases": _biases(fields), **{name: number(fields, name, 1.0) for name in names}}


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", "Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2, TinyLlama", lambda fields: {"biases": _biases(fields)}
    ),
    "MistralForCausalLM": Family("mistral", "Mistral 7B, Mistral Nemo", _window, {"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", "Qwen2, Qwen2.5", _qwen2, {"sliding_window": 4096}),
    "Qwen3ForCausalLM": Family("qwen3", "Qwen3", _qwen3, {"head_dim": 128, "sliding_window": 4096}),
    "SmolLM3ForCausalLM": Family(
        "smollm3", "SmolLM3", _smollm3, {"tie_word_embeddings": True, "rope_theta": 2000000.0}
    ),
    "GraniteForCausalLM": Family("granite", "Granite 3.0 to 3.3", _granite),
    "Phi3ForCausalLM": Family("phi3", "Phi-3, Phi-3.5, Phi-4", _phi3, {"rms_norm_eps": 1e-5}, True),
}

_EXPERTS = "its layers are mixtures of experts, and the kernels support dense layers only", "serve a dense model"
_LATENT = "its keys and values are compressed into a latent vector (MLA), which the KV cache does not support"
_DENSE = "serve a model of another family"
_MULTIMODAL = "it reads images or sound as well as text", "serve the text model that it was made from"
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "granitemoehybrid", "phimoe", "olmoe", "gpt_oss"), _EXPERTS
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3"), (_LATENT, _DENSE)),
    **dict.fromkeys(
        ("mllama", "llama4", "llava", "llava_next", "mistral3", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        _MULTIMODAL,
    ),
    **dict.fromkeys(
        ("qwen2_audio", "qwen2_5_omni", "phi3_v", "phi4_multimodal", "gemma3", "idefics3", "smolvlm"), _MULTIMODAL
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "jamba", "bamba", "qwen3_next", "falcon_mamba"),
        ("some of its layers have a recurrent state instead of keys and values", _DENSE),
    ),
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _refusal(kind: Any, fields: Fields) -> tuple[str, str] | None:
    """Return (reason, remedy) for an unsupported model, from its model type or its fields; None if unknown."""
    if isinstance(kind, str) and kind in REFUSED:
        return REFUSED[kind]
    if any(isinstance(fields.get(name), Mapping) for name in ("vision_config", "audio_config")):
        return _MULTIMODAL
    if fields.get("kv_lora_rank"):
        return _LATENT, _DENSE
    return _EXPERTS if any(fields.get(name) for name in _EXPERT_COUNTS) else None


def family_of(fields: Fields) -> Family:
    """Return the family of a config.json. Raises ConfigError for an unsupported family, with the reason if known."""
    found = fields.get("architectures")
    kind = fields.get("model_type")
    named = found[0] if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str) else None
    if named is None and not found:
        named = next((name for name, family in FAMILIES.items() if family.model_type == (kind or "llama")), None)
    family = FAMILIES.get(named or "")
    if family is not None and kind in (None, family.model_type):
        return family
    served = ", ".join(FAMILIES)
    refusal = _refusal(kind, fields)
    if refusal is not None:
        reason, remedy = refusal
        raise ConfigError(f"architecture {found} is not supported, because {reason}: {remedy}; supported are {served}")
    raise ConfigError(f"architecture {found} (model_type {kind!r}) is not supported: serve one of {served}")


def _window_of_late_layers(fields: Fields) -> dict[str, Any]:
    """Return Qwen's window, if enabled; it applies to the layers from max_window_layers on."""
    first = fields.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ConfigError(f"max_window_layers must be a number of layers, not {first!r}: correct config.json")
    return _switched_window(fields, range(first, max(first, integer(fields, "num_hidden_layers"))))


def _switched_window(fields: Fields, windowed: Sequence[int]) -> dict[str, Any]:
    """Return the window, if enabled; it applies to the layers in layer_types, without that field to `windowed`."""
    if not flag(fields, "use_sliding_window"):
        return {}
    layers, kinds = range(integer(fields, "num_hidden_layers")), fields.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if layer in windowed else "full_attention" for layer in layers]
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(layers)
        or any(kind not in ("full_attention", "sliding_attention") for kind in kinds)
    ):
        raise ConfigError(
            "layer_types must have 'full_attention' or 'sliding_attention' for each layer: correct config.json, or "
            "serve a model with these types of layers"
        )
    full = tuple(layer for layer in layers if kinds[layer] == "full_attention")
    return {**_window(fields), "full_layers": full}
