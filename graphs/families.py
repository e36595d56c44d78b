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
EXPERT_SPELLINGS = (("mlp", MLP_MODULES), ("block_sparse_moe", ("w1", "w3", "w2")))
"""Names of a sparse layer's MLP, and of an expert's gate, up and down, in checkpoints and adapters."""
ADAPTER_PARTS = ("dora", "ia3", "bias")
"""What an adapter may have besides LoRA: magnitudes of DoRA; factors of IA3; biases, of B or trained ones of the base,
which factors of IA3 change too.
"""

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


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    layers, dense = integer(fields, "num_hidden_layers"), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in dense):
        raise ConfigError(f"mlp_only_layers must be a list of layers, not {dense!r}: correct config.json")
    step = integer(fields, "decoder_sparse_step", 1)
    return {
        "biases": _biases(fields),
        "head_norms": True,
        "dense_layers": tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step),
        "norm_topk_prob": flag(fields, "norm_topk_prob"),
        **(_window(fields) if flag(fields, "use_sliding_window") else {}),
        **_experts(fields, "moe_intermediate_size", 128, 8, 768),
    }


def _mixtral(fields: Fields) -> dict[str, Any]:
    return {**_window(fields), **_experts(fields, "intermediate_size", 8, 2)}


def _granite_moe(fields: Fields) -> dict[str, Any]:
    return {**_granite(fields), **_experts(fields, "intermediate_size", 8, 2)}


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
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        _qwen3_moe,
        {"sliding_window": 4096, "num_key_value_heads": 4, "max_position_embeddings": 32768},
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        "Mixtral 8x7B, 8x22B",
        _mixtral,
        {
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "GraniteMoeForCausalLM": Family("granitemoe", "Granite 3.0 and 3.1 1B-A400M, 3B-A800M", _granite_moe),
}

_SPARSE = "serve a model of Qwen3-MoE, Mixtral or Granite-MoE, or a dense model"
_EXPERTS = "its mixtures of experts are of another kind than those that are supported", _SPARSE
_SHARED = "its layers have a shared expert besides the chosen ones, which is not supported", _SPARSE
_SCORES = "its router chooses by sigmoid scores with a correction for each expert, which is not supported", _SPARSE
_HYBRID = "some of its layers have a recurrent state instead of keys and values"
_LATENT = "its keys and values are compressed into a latent vector (MLA), which the KV cache does not support"
_DENSE = "serve a model of another family"
_MULTIMODAL = "it reads images or sound as well as text", "serve the text model that it was made from"
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("qwen2_moe", "granitemoeshared", "hunyuan_v1_moe", "llama4_text"), _SHARED),
    **dict.fromkeys(("glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2", "afmoe"), _SCORES),
    "gpt_oss": ("its experts are stored in mxfp4, which is not supported", _SPARSE),
    **dict.fromkeys(("olmoe", "flex_olmo"), ("it normalizes all heads of q and k as one vector", _SPARSE)),
    "phimoe": ("its router chooses by sparse mixing, and its norms subtract the mean", _SPARSE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "minicpm3"), (_LATENT, _DENSE)),
    **dict.fromkeys(
        ("mllama", "llama4", "llava", "llava_next", "mistral3", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        _MULTIMODAL,
    ),
    **dict.fromkeys(
        ("qwen2_audio", "qwen2_5_omni", "phi3_v", "phi4_multimodal", "gemma3", "idefics3", "smolvlm"), _MULTIMODAL
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "jamba", "bamba", "falcon_mamba", "granitemoehybrid", "minimax"), (_HYBRID, _DENSE)
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), (_HYBRID, _DENSE)),
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
    if f"{(named or '').removesuffix('Model')}ForCausalLM" in FAMILIES:
        refusal = "it has no output head", "save the model of AutoModelForCausalLM, not of AutoModel"
    if refusal is not None:
        reason, remedy = refusal
        raise ConfigError(f"architecture {found} is not supported, because {reason}: {remedy}; supported are {served}")
    raise ConfigError(f"architecture {found} (model_type {kind!r}) is not supported: serve one of {served}")


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,),
    **dict.fromkeys(("moe_num_shared", "n_shared_experts", "num_shared_experts"), (0,)),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), (0,)),
}
"""Fields of other routers and of shared experts -> values that change nothing."""
_EXPERT_COLUMNS = 16  # the kernels of the experts' linears read columns in multiples of it


def _experts(fields: Fields, width: str, experts: int, per_token: int, columns: int | None = None) -> dict[str, Any]:
    """Return the fields of a mixture of experts; `width` is the field of an expert's intermediate size.

    The others are transformers' values of missing fields. transformers 5 writes `num_local_experts` for all families.
    """
    for name, allowed in _NEUTRAL.items():
        if fields.get(name) is not None and fields[name] not in allowed:
            raise ConfigError(f"{name} {fields[name]!r} is not supported, only {allowed[-1]!r}: {_SPARSE}")
    counts = {integer(fields, name) for name in ("num_experts", "num_local_experts") if fields.get(name) is not None}
    if len(counts) > 1:
        raise ConfigError(f"num_experts and num_local_experts differ ({sorted(counts)}): correct config.json")
    count, chosen = counts.pop() if counts else experts, integer(fields, "num_experts_per_tok", per_token)
    if chosen > count:
        raise ConfigError(f"num_experts_per_tok {chosen} is above the number of experts {count}: correct config.json")
    inner = integer(fields, width, columns)
    if inner % _EXPERT_COLUMNS:
        raise ConfigError(
            f"{width} {inner} is not supported: the kernels of experts need a multiple of {_EXPERT_COLUMNS}; {_SPARSE}"
        )
    return {"num_experts": count, "num_experts_per_tok": chosen, "expert_intermediate_size": inner}


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
