"""Random adapters for benches are adapters that the loader takes."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.config import LlamaConfig
from sidestream.tools.bench.floors import adapter_bytes
from sidestream.tools.bench.random_model import write_random_adapter, write_tokenizer
from sidestream.tools.options.models import SHAPES
from tokenizers import Tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def test_the_loader_takes_them(tmp_path: Path) -> None:
    path = write_random_adapter(tmp_path / "one", CONFIG, 4, seed=0)
    adapter = load_adapter(path, LlamaConfig.from_dict(CONFIG), 8)
    assert adapter.rank == 4
    assert json.loads((tmp_path / "one" / "adapter_config.json").read_text())["lora_alpha"] == 8
    tensors = load_file(tmp_path / "one" / "adapter_model.safetensors")
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) == adapter_bytes(CONFIG, 4)


def test_the_seed_decides(tmp_path: Path) -> None:
    first, same, other = (
        load_file(Path(write_random_adapter(tmp_path / str(number), CONFIG, 4, seed)) / "adapter_model.safetensors")
        for number, seed in enumerate((1, 1, 2))
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_tokenizer_has_as_many_tokens_as_asked_for(tmp_path: Path) -> None:
    """The largest vocabulary of --shape is Qwen's."""
    largest = max(shape["vocab_size"] for shape in SHAPES.values())
    write_tokenizer(tmp_path / "tokenizer.json", largest)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == largest
