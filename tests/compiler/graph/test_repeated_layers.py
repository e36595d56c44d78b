"""The graph of a model whose layers were copied is the one that tracing all layers gives."""

import re
from typing import Any

import pytest
import torch
from sidestream.compiler.graph import repeated_layers
from sidestream.compiler.graph.capture import Captured, capture_module
from sidestream.compiler.graph.repeated_layers import capture_model
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Decoder, Llama
from sidestream.graphs.lora import LoraShape
from torch import fx

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama": (2, {}),
    "Llama, two layers": (2, {"num_hidden_layers": 2}),
    "SmolLM3": (4, {"model_type": "smollm3", "num_hidden_layers": 6, "no_rope_layers": [1, 1, 0, 1, 0, 1]}),
    "Qwen3": (4, {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}),
    "Granite": (2, {"model_type": "granite", "residual_multiplier": 0.22, "attention_multiplier": 0.1}),
    "Qwen3-MoE": (3, {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1], "decoder_sparse_step": 1}),
}
"""Number of layers to trace, and fields of config.json."""


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of layers of every model that `capture_model` traces."""
    counts: list[int] = []

    def counted(module: Llama, *arguments: Any) -> Captured:
        counts.append(len(module.model.layers))
        return capture_module(module, *arguments)

    monkeypatch.setattr(repeated_layers, "capture_module", counted)
    return counts


def described(captured: Captured) -> list[tuple[str, ...]]:
    """Nodes with everything that passes and dumps read. Symbols have other names in another trace."""

    def value(found: Any) -> Any:
        if isinstance(found, (list, tuple)):
            return [value(each) for each in found]
        if isinstance(found, torch.Tensor):
            return tuple(found.shape), found.stride(), found.dtype, found.device
        return found

    def line(node: fx.Node) -> tuple[str, ...]:
        modules = list(node.meta.get("nn_module_stack", {}).values())
        known = (node.meta.get(key) for key in ("kind", "recipe", "stack_trace"))
        parts = (node.op, node.name, node.target, node.args, node.kwargs, value(node.meta.get("val")), modules, *known)
        return tuple(re.sub(r"\bs\d+\b", "s", str(part)) for part in parts)

    return [line(node) for node in captured.graph_module.graph.nodes]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_is_that_of_all_layers(family: str, traced: list[int]) -> None:
    few, fields = FAMILIES[family]
    config = LlamaConfig.from_dict({"model_type": "llama", **BASE, **fields})
    lora = LoraShape(slots=3, rank=16, targets=("q_proj", "down_proj"))
    model = Llama(config, lora, dtype=torch.bfloat16, device="meta")
    copied = capture_model(model)
    assert traced == [few]
    whole = capture_module(model, model.example_inputs(), model.dynamic_shapes())
    assert described(copied) == described(whole)
    assert (copied.user_inputs, copied.in_spec, copied.out_spec) == (whole.user_inputs, whole.in_spec, whole.out_spec)
    assert {name: value.shape for name, value in copied.constants.items()} == {
        name: value.shape for name, value in whole.constants.items()
    }


def test_layers_that_are_no_chain_are_all_traced(traced: list[int]) -> None:
    """Here each layer reads the input of the one before, too."""

    class Crossed(Decoder):
        def forward(self, *inputs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
            input_ids, step, caches = inputs[0], inputs[3], inputs[-1]
            before = after = self.embed_tokens(input_ids, step)
            for layer, cache in zip(self.layers, caches, strict=True):
                normed = layer.mlp(layer.input_layernorm(after), step) + cache.sum()
                before, after = normed, normed * 2 + before
            return after, []

    model = Llama(LlamaConfig.from_dict({"model_type": "llama", **BASE}), None, dtype=torch.float32, device="meta")
    model.model.__class__ = Crossed
    copied = capture_model(model)
    assert traced == [2, 5]
    assert described(copied) == described(capture_module(model, model.example_inputs(), model.dynamic_shapes()))
