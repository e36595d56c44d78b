"""Random tiny models of every family that is served.

base = tiny_family(tmp_path, "qwen2", dice)
"""

import random
from pathlib import Path
from typing import Any

from .tiny import LINEAR_ROPE, LLAMA3_ROPE, TinyBase, tiny_model

# name -> transformers' name of the classes, and the config fields that make the difference
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"use_sliding_window": False, "sliding_window": 64}),
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
        "num_hidden_layers": 2,
        "intermediate_size": dice.choice([192, 256]),
    }
    if family == "Qwen2":  # its heads are as wide as the model allows
        shape.update(hidden_size=heads * width, initializer_range=(heads * width) ** -0.5)
    rope = dice.choice([None, LINEAR_ROPE, LLAMA3_ROPE])
    if rope is not None:
        shape["rope_parameters"] = rope
    return tiny_model(directory, family, seed=dice.randrange(1000), **{**shape, **fields, **overrides})
