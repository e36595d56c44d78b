"""Dumps of whole models on the meta device, and what their pages hold."""

import json
import re
from pathlib import Path
from typing import Any

from sidestream.compiler.api import CompiledModel
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.lora import LoraShape

from .meta import compiled_without_weights

EIGHT_BILLION: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
DECODE = Bucket(64, 64, 64 * 8 + 1, 8, decode=True)
MIXED = Bucket(256, 8, 65, 8)


def compiled_on_meta(fields: dict[str, Any], layers: int) -> CompiledModel:
    """A Llama with eight slots for adapters, compiled without weights."""
    options = CompileOptions()
    return compiled_without_weights(
        {**fields, "num_hidden_layers": layers}, LoraShape(8, 16), options, options.model_dtype, text=True
    )


def data_of(page: str) -> dict[str, Any]:
    """The data inside a page's text."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def dumped_8b(directory: Path, layers: int = 32) -> Path:
    """The page of the 8B shape with all its layers or some, and one program of each kind."""
    return compiled_on_meta(EIGHT_BILLION, layers).dump(directory, [DECODE, MIXED]) / "index.html"
