"""Adapters that change the embedding or the output head, as peft trains and saves them."""

import copy
from pathlib import Path
from typing import Any

import torch

from .tiny import TinyBase

KINDS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "both, tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "own ranks": {
        "target_modules": ["q_proj", "embed_tokens", "lm_head"],
        "rank_pattern": {"embed_tokens": 3, "lm_head": 12},
        "alpha_pattern": {"lm_head": 4},
    },
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "both saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "both saved, tied": {
        "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True
    },
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3, 200]},
    "tokens of both": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [17, 2], "lm_head": [44, 5, 1]},
    },
    "tokens of the head": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [44, 5, 1]}},
}  # fmt: skip


def trained(base: TinyBase, place: Path, seed: int = 0, whole: bool = False, **options: Any) -> Path:
    """An adapter as peft trains and saves it: all that it trains is changed, and few rows of whole matrices."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(copy.deepcopy(base.model), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            if "modules_to_save" in name:
                noise[[row for row in range(len(noise)) if row not in (2, 17, 44, 301)]] = 0
            parameter += noise
    model.save_pretrained(place, save_embedding_layers=True if whole else "auto")
    return place
