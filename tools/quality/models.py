"""The evaluation model and its adapters: shapes, recipes, and how both are written for others to read."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from .train_data import BOS, EOS

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
BASE_NAME = "sidestream-quality"


@dataclass(frozen=True)
class AdapterRecipe:
    """Shape of one adapter, in PEFT's words; `effort` multiplies its training steps."""

    rank: int
    alpha: int
    targets: list[str]
    rslora: bool = False
    effort: float = 1.0
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)

    def config(self) -> LoraConfig:
        """As PEFT takes it."""
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=self.targets,
            use_rslora=self.rslora,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )


# Named after their tasks; together they use what users' adapters use.
ADAPTERS = {
    "arithmetic": AdapterRecipe(32, 64, ALL_LINEAR),
    "sorting": AdapterRecipe(16, 32, ATTENTION),
    "strings": AdapterRecipe(16, 16, ALL_LINEAR, rslora=True),
    "programs": AdapterRecipe(64, 128, ["q_proj", "v_proj", "up_proj", "down_proj"], effort=1.2),
    "json": AdapterRecipe(
        16, 32, ALL_LINEAR, effort=1.1, rank_pattern={"q_proj": 32, "down_proj": 8}, alpha_pattern={"q_proj": 32, "down_proj": 16}
    ),
    "retrieval": AdapterRecipe(8, 16, ATTENTION, effort=4.5),  # texts of 32k tokens want practice
}


def model_config(tokenizer: Tokenizer, smoke: bool = False) -> LlamaConfig:
    """30 M parameters in the shape of the big Llamas: head_dim 128, grouped queries, tied embeddings, 32k positions and more."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256 if smoke else 512,
        intermediate_size=512 if smoke else 1536,
        num_hidden_layers=2 if smoke else 9,
        num_attention_heads=2 if smoke else 4,
        num_key_value_heads=1 if smoke else 2,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
    )


def save_base(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the checkpoint in bfloat16, with config.json in the spelling of transformers 4, which every release reads."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(directory))
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters", None) or {}
    config.pop("transformers_version", None)
    config.pop("dtype", None)
    config |= {"torch_dtype": "bfloat16", "rope_theta": rope.get("rope_theta", config.get("rope_theta")), "rope_scaling": None}
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False})
    tokenizer.save(str(directory / "tokenizer.json"))


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Writes one adapter as PEFT does, its tensors in bfloat16, without the model card and without paths of this machine."""
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    for parameter in model.parameters():  # not the model itself: RoPE's frequencies stay as they are
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(str(directory), save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)
    config = json.loads((directory / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"])
    _write(directory / "adapter_config.json", config)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
