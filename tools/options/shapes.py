"""config.json of models of other families at common sizes, for --shape."""

from typing import Any


def _fields(
    model_type: str,
    *,
    vocab: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: tuple[int, int],
    positions: int,
    eps: float = 1e-5,
    theta: float,
    **others: Any,
) -> dict[str, Any]:
    """Return the fields of a config; `heads` are query and KV heads, `others` fields by their own names."""
    architecture = {"qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3", "phi3": "Phi3"}
    architecture |= {"qwen3_moe": "Qwen3Moe", "granitemoe": "GraniteMoe"}
    return {
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "architectures": [f"{architecture.get(model_type, model_type.capitalize())}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
        "rope_theta": theta,
        **others,
    }


_QWEN_25: dict[str, Any] = {"use_sliding_window": False, "eos_token_id": 151643}
_QWEN_3: dict[str, Any] = {
    "head_dim": 128,
    "attention_bias": False,
    "use_sliding_window": False,
    "eos_token_id": 151645,
}
_QWEN_3_SIZES: dict[str, Any] = {"vocab": 151936, "positions": 40960, "layers": 36, "heads": (32, 8)}
_MISTRAL: dict[str, Any] = {
    "head_dim": 128,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "heads": (32, 8),
}
_LLAMA_32: dict[str, Any] = {
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "vocab": 128256,
}
_SMOLLM: dict[str, Any] = {"no_rope_layer_interval": 4, "use_sliding_window": False, "tie_word_embeddings": True}
_GRANITE: dict[str, Any] = {
    "attention_bias": False,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 16.0,
    "tie_word_embeddings": True,
}
# fmt: off
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _fields("llama", hidden=2048, intermediate=8192, layers=16, heads=(32, 8), positions=131072,
                            theta=5e5, head_dim=64, **_LLAMA_32),
    "llama-3.2-3b": _fields("llama", hidden=3072, intermediate=8192, layers=28, heads=(24, 8), positions=131072,
                            theta=5e5, head_dim=128, **_LLAMA_32),
    "mistral-7b": _fields("mistral", vocab=32768, hidden=4096, intermediate=14336, layers=32, positions=32768,
                          theta=1e6, **_MISTRAL),
    "mistral-nemo-12b": _fields("mistral", vocab=131072, hidden=5120, intermediate=14336, layers=40, positions=131072,
                                theta=1e6, **_MISTRAL),
    "qwen2.5-7b": _fields("qwen2", vocab=152064, hidden=3584, intermediate=18944, layers=28, heads=(28, 4),
                          positions=32768, eps=1e-6, theta=1e6, **_QWEN_25),
    "qwen3-4b": _fields("qwen3", hidden=2560, intermediate=9728, eps=1e-6, theta=1e6, tie_word_embeddings=True,
                        **_QWEN_3_SIZES, **_QWEN_3),
    "qwen3-8b": _fields("qwen3", hidden=4096, intermediate=12288, eps=1e-6, theta=1e6, **_QWEN_3_SIZES, **_QWEN_3),
    "smollm3-3b": _fields("smollm3", vocab=128256, hidden=2048, intermediate=11008, layers=36, heads=(16, 4),
                          positions=65536, eps=1e-6, theta=5e6, bos_token_id=128000, eos_token_id=128012, **_SMOLLM),
    "granite-3.3-8b": _fields("granite", vocab=49159, hidden=4096, intermediate=12800, layers=40, heads=(32, 8),
                              positions=131072, theta=1e7, bos_token_id=0, eos_token_id=0, **_GRANITE),
    "phi-3-mini": _fields("phi3", vocab=32064, hidden=3072, intermediate=8192, layers=32, heads=(32, 32),
                          positions=4096, theta=1e4, sliding_window=2047, bos_token_id=1, eos_token_id=32000),
    "phi-4": _fields("phi3", vocab=100352, hidden=5120, intermediate=17920, layers=40, heads=(40, 10),
                     positions=16384, theta=250000.0, sliding_window=None, bos_token_id=100257, eos_token_id=100257),
    "qwen3-30b-a3b": _fields("qwen3_moe", vocab=151936, hidden=2048, intermediate=6144, layers=48, heads=(32, 4),
                             positions=40960, eps=1e-6, theta=1e6, num_experts=128, num_experts_per_tok=8,
                             moe_intermediate_size=768, norm_topk_prob=True, **_QWEN_3),
    "mixtral-8x7b": _fields("mixtral", vocab=32000, hidden=4096, intermediate=14336, layers=32, heads=(32, 8),
                            positions=32768, theta=1e6, num_local_experts=8, num_experts_per_tok=2,
                            sliding_window=None, bos_token_id=1, eos_token_id=2),
}
# fmt: on
