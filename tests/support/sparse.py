"""Small models with experts and random weights, with random adapters in all slots.

sparse_model("qwen3", lora=True)       # eager module in fp32
sparse_model("granite", lora=False, device="meta")
"""

from dataclasses import replace
from typing import Any

import torch
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.families import EXPERT_TARGETS
from sidestream.graphs.llama import INV_FREQ, Llama
from sidestream.graphs.lora import TARGETS, LoraShape

from .meta import FIELDS

EXPERTS, TOP_K, WIDTH = 8, 2, 64
SIZES = {**FIELDS, "vocab_size": 320}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 8.0,
}
# name -> fields of config.json of the dense family with the same attention, and fields of the config
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3": ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, {"norm_topk_prob": False}),
    "mixtral": ({"num_hidden_layers": 2}, {"dense_layers": (0,)}),
    "granite": ({"architectures": ["GraniteForCausalLM"], "model_type": "granite", **MULTIPLIERS}, {}),
}


def sparse_config(kind: str, fields: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    """The config of a model like Qwen3-MoE, Mixtral (here with a dense layer before the sparse one) or Granite-MoE."""
    stored, own = KINDS[kind]
    config = LlamaConfig.from_dict({**SIZES, **stored, **(fields or {})})
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "expert_intermediate_size": WIDTH}
    return replace(config, **{**sizes, **own, **changes})


def sparse_model(
    kind: str,
    lora: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    targets: tuple[str, ...] = (*TARGETS, *EXPERT_TARGETS),
    fields: dict[str, Any] | None = None,
    **changes: Any,
) -> Llama:
    """The same values for the same arguments, in fp32 and rounded to other dtypes."""
    shape = LoraShape(3, 16, targets, expert_rank=32) if lora else None
    model = Llama(sparse_config(kind, fields, **changes), shape, dtype, device)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if device != "meta" and name != INV_FREQ:
            values = torch.randn(tensor.shape, generator=generator)
            scaled = 1 + 0.1 * values if tensor.dim() == 1 else values * (0.04 if "lora" in name else 0.08)
            if tensor.dtype == torch.int8:
                scaled = (values * 40).round().clamp(-127, 127)
            elif name.endswith("weight_scale"):
                scaled = 0.002 * (1 + values.abs())
            tensor.data.copy_(scaled)
    return model
