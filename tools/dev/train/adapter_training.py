"""Tokenizers and adapters of trained models, and writers of both."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel

from ...eval.real.adapters import ALL_LINEAR, ATTENTION, weighted_loss  # noqa: F401

try:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401
except ImportError as missing:
    raise ImportError(f"training needs {missing.name}; install the extra: pip install 'sidestream[train]'") from None


def adapted(model: Any, shape: Mapping[str, Any]) -> PeftModel:
    """Return the model with a new adapter; `shape` has arguments of LoraConfig."""
    return get_peft_model(model, LoraConfig(lora_dropout=0.0, task_type="CAUSAL_LM", **shape))


def train_bpe(vocabulary: int, texts: Iterable[str], pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """Return a byte-level BPE with `<s>` (0) before each text and `</s>` (1); any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def save_base(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the checkpoint in bfloat16, with config.json in the spelling of transformers 4."""
    directory.mkdir(parents=True, exist_ok=True)
    _round(model)
    model.save_pretrained(str(directory))
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters", None) or {}
    config.pop("transformers_version", None)
    config.pop("dtype", None)
    config |= {
        "torch_dtype": "bfloat16",
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope_scaling": None,
    }
    _write(directory / "config.json", config)
    _write(
        directory / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "do_sample": False},
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def save_adapter(model: PeftModel, directory: Path, base: str) -> None:
    """Write an adapter of the model named `base` in bfloat16, without model card and paths of this machine."""
    model.peft_config["default"].base_model_name_or_path = base
    _round(model)
    model.save_pretrained(str(directory), save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)
    config = json.loads((directory / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"])
    _write(directory / "adapter_config.json", config)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _round(model: torch.nn.Module) -> None:
    """Round parameters to bfloat16; `model.to(torch.bfloat16)` would round RoPE's frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
