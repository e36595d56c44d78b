"""Random PEFT adapters for benches: the right shapes and magnitudes, no meaning."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .floors import projection_widths

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_random_adapter(directory: Path, config: Mapping[str, Any], rank: int, seed: int) -> str:
    """Writes an adapter of `rank` and alpha 2 * rank on all seven projections, bfloat16, in PEFT's format; returns the
    directory.

    `config` holds the fields of the base model's config.json.
    """
    import torch
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, deviation: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=source) * deviation).to(torch.bfloat16)

    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in projection_widths(config).items():
            block = "self_attn" if name in ATTENTION else "mlp"
            key = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{key}.lora_A.weight"] = draw(rank, inputs, inputs**-0.5)
            tensors[f"{key}.lora_B.weight"] = draw(outputs, rank, 0.1 * rank**-0.5)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(projection_widths(config)),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return str(directory)
