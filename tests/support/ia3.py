"""IA3 adapters as peft trains and saves them."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .tiny import TinyBase

PAPER: dict[str, Any] = {
    "target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]
}  # fmt: skip
"""PEFT's defaults for Llama."""
EVERYWHERE: dict[str, Any] = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
OUTPUTS: dict[str, Any] = {"target_modules": "all-linear", "feedforward_modules": []}
"""Also the outputs of down_proj."""


def ia3_adapters(base: TinyBase, settings: Sequence[dict[str, Any]], seed: int = 1) -> list[Path]:
    """One adapter for each entry of `settings` (fields of IA3Config), with factors around 1, some of them negative."""
    from peft import IA3Config, get_peft_model

    generator = torch.Generator().manual_seed(seed)
    paths = []
    for fields in settings:
        model = get_peft_model(copy.deepcopy(base.model), IA3Config(task_type="CAUSAL_LM", **fields))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "ia3_l" in name:
                    parameter.add_(0.7 * torch.randn(parameter.shape, generator=generator))
                elif parameter.requires_grad:  # a saved embedding or head: few rows
                    parameter[[2, 17, 44]] += 0.3 * torch.randn(3, parameter.shape[1], generator=generator)
        paths.append(base.path.parent / f"ia3_{len(list(base.path.parent.glob('ia3_*')))}")
        model.save_pretrained(paths[-1])
    return paths
