"""A small Llama on the meta device: enough to compile, dump and explain, with no weight in memory."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from sidestream.compiler.api import CompiledModel
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape

from .meta import compiled_without_weights

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DECODE = Bucket(tokens=8, sequences=8, pages=65, blocks=8, decode=True)
DECODE_BASE = Bucket(tokens=8, sequences=8, pages=65, blocks=8, decode=True, lora=False)
MIXED = Bucket(tokens=256, sequences=8, pages=65, blocks=8)


def meta_llama(layers: int = 2, slots: int = 4, rank: int = 16, dtype: Any = None, **fields: Any) -> Llama:
    """`slots=0`: no room for adapters."""
    config = LlamaConfig.from_dict({**FIELDS, "num_hidden_layers": layers, **fields})
    return Llama(config, LoraShape(slots, rank) if slots else None, dtype, device="meta")


@cache
def compiled_llama(options: CompileOptions = CompileOptions(), layers: int = 2) -> CompiledModel:  # noqa: B008
    """The small model compiled, once for each set of options."""
    return compiled_without_weights(
        {**FIELDS, "num_hidden_layers": layers}, LoraShape(4, 16), options, options.model_dtype, text=True
    )


def config_directory(root: Path, **fields: Any) -> Path:
    """A directory with nothing but a config.json."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps({**FIELDS, **fields}))
    return root
