"""Models on the meta device: what is only captured and compiled needs no weights.

FIELDS is the config.json of a one-layer Llama. `compiled_without_weights` captures each model once for all of a run's
tests, and runs the passes once for each set of options.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from sidestream.compiler.api import CompiledModel, Optimized, optimize
from sidestream.compiler.graph.capture import Captured
from sidestream.compiler.options import CompileOptions
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape

from .captured import capture_once

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@cache
def _captured(config: str, lora: LoraShape | None, dtype: torch.dtype) -> tuple[Captured, Sequence[str]]:
    model = Llama(LlamaConfig.from_dict(json.loads(config)), lora, dtype, "meta")
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return capture_once(model, model.example_inputs(), model.dynamic_shapes()), names


@cache
def _optimized(
    config: str, lora: LoraShape | None, dtype: torch.dtype, options: CompileOptions, text: bool
) -> Optimized:
    captured, names = _captured(config, lora, dtype)
    return optimize(captured.copy(), options, names, text=text)


def compiled_without_weights(
    fields: Mapping[str, Any],
    lora: LoraShape | None,
    options: CompileOptions,
    dtype: torch.dtype = torch.bfloat16,
    text: bool = False,
) -> CompiledModel:
    """A Llama compiled without weights, with the graphs' text at once if it is to be dumped. Its programs are made for
    the caller alone, so that what a test patches in a pass over a program's own graph takes effect; what it patches in
    an earlier pass would not.
    """
    config = json.dumps(fields, sort_keys=True)
    return CompiledModel(partial(_optimized, config, lora, dtype, options), options, text=text)
