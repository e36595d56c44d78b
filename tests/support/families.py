"""Random tiny models of every family that is served.

base = tiny_family(tmp_path, "qwen2", dice)
"""

import random
from pathlib import Path
from typing import Any

from .tiny import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, TinyBase, tiny_model

# name -> transformers' name of the classes, and the config fields that make the difference
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {"use_sliding_window": False, "sliding_window": 64}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "num_hidden_layers": 2},
    ),
    "qwen3": ("Qwen3", {"use_sliding_window": False}),
    "qwen3-window": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_hidden_layers": 2,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "pad_token_id": 0}),
    "smollm3-window": (
        "SmolLM3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "num_hidden_layers": 2,
            "no_rope_layers": [1, 0],
            "pad_token_id": 0,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
            "attention_bias": True,
        },
    ),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "llama-narrow": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 80}),
    "phi3-narrow": (  # as Phi-3.5 mini: heads of 96, longrope
        "Phi3",
        {
            "pad_token_id": 0,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 96,
            "hidden_size": 192,
            "initializer_range": 192**-0.5,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1 + index / 40 for index in range(48)],
                "long_factor": [1 + index for index in range(48)],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "phi3-partial": (  # as Phi-4-mini: three quarters of a head are turned, longrope
        "Phi3",
        {
            "pad_token_id": 0,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "hidden_size": 256,
            "initializer_range": 256**-0.5,
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1 + index / 40 for index in range(48)],
                "long_factor": [1 + index for index in range(48)],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "phi3-window": ("Phi3", {"pad_token_id": 0, "sliding_window": 24}),
}


def tiny_family(directory: Path, name: str, dice: random.Random, **overrides: Any) -> TinyBase:
    """A model of a family with a shape that `dice` choose, without what `overrides` fix."""
    family, fields = FAMILIES[name]
    heads, ratio = dice.choice([(2, 1), (4, 2), (3, 3), (2, 2)])
    width = dice.choice([64, 128])
    shape: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads // ratio,
        "head_dim": width,
        "tie_word_embeddings": dice.random() < 0.5,
        "num_hidden_layers": 1,
        "intermediate_size": dice.choice([192, 256]),
    }
    if family in ("Qwen2", "Granite", "Phi3", "SmolLM3"):  # their heads are as wide as the model allows
        shape.update(hidden_size=heads * width, initializer_range=(heads * width) ** -0.5)
    rope = None if family == "Phi3" else dice.choice([None, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE])
    if rope is not None:
        shape["rope_parameters"] = rope
    return tiny_model(directory, family, seed=dice.randrange(1000), **{**shape, **fields, **overrides})
