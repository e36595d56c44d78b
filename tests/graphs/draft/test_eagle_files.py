"""Directories of drafts: published spellings are read, hostile ones are refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs.checkpoint import CheckpointError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.config_fields import ConfigError
from sidestream.graphs.draft.config import EagleConfig, read_eagle_config
from sidestream.graphs.draft.weights import read_eagle_tensors
from support.eagle import eagle_head

TARGET = LlamaConfig(320, 128, 256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
WEIGHTS = "model.safetensors"


def configure(path: Path, **fields: Any) -> EagleConfig:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return read_eagle_config(path)


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Other tensors in the file; None removes one."""
    found = {**load_file(path / WEIGHTS), **{name.replace("__", "."): value for name, value in tensors.items()}}
    save_file({name: value for name, value in found.items() if value is not None}, path / WEIGHTS)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return eagle_head(tmp_path, TARGET, vocabulary=100)


def test_a_published_config_is_read(tmp_path: Path) -> None:
    """As the heads for Llama-3.1-8B have it: no rope, no head_dim, no layers."""
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    target = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128)
    config = EagleConfig.from_dict(fields).fitted(target)
    assert config.feature_layers == (2, 16, 29) and config.rope_theta == 10000.0
    assert config.module_shape("midlayer.self_attn.q_proj") == (4096, 8192)
    assert config.module_shape("midlayer.self_attn.o_proj") == (4096, 4096)


def test_both_ways_of_counting_layers(head: Path) -> None:
    """vLLM's heads say how many layers have run, SGLang's which layer ran last."""
    ids = "eagle_aux_hidden_state_layer_ids"
    assert configure(head, **{ids: [2, 3, 6]}).fitted(TARGET).feature_layers == (2, 3, 6)
    assert configure(head, **{ids: None, "eagle_config": {ids: [1, 2, 5]}}).fitted(TARGET).feature_layers == (2, 3, 6)
    assert configure(head, **{ids: None, "eagle_config": None}).fitted(TARGET).feature_layers == (2, 3, 3)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture"),
        ({"architectures": None}, "architecture"),
        ({"hidden_size": 256}, "hidden_size is 256, the model's is 128"),
        ({"vocab_size": 321}, "vocab_size is 321"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        ({"head_dim": 128}, "head_dim is 128"),
        ({"draft_vocab_size": 1000}, "draft_vocab_size 1000"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size must be"),
        ({"num_hidden_layers": 2}, "a draft of 2 layers"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"target_hidden_size": 256}, "target_hidden_size"),
        ({"norm_before_residual": 1}, "norm_before_residual"),
        ({"eagle_config": [1]}, "eagle_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "three layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, True]}, "three layers"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 2, 4]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, "after layer 7, but the model has 6"),
    ],
)
def test_what_is_refused_in_a_config(head: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        configure(head, **fields).fitted(TARGET)


def test_a_small_model_needs_named_layers(head: Path) -> None:
    small = LlamaConfig(320, 128, 256, 4, 4, 2, 64)
    with pytest.raises(ConfigError, match="add eagle_aux_hidden_state_layer_ids"):
        configure(head, eagle_aux_hidden_state_layer_ids=None).fitted(small)


def read(path: Path) -> dict[str, torch.Tensor]:
    return read_eagle_tensors(path, read_eagle_config(path).fitted(TARGET))


def test_all_tensors_are_as_they_are_stored(head: Path) -> None:
    change(head, embed_tokens__weight=torch.zeros(320, 128))
    stored, found = load_file(head / WEIGHTS), read(head)
    assert stored.keys() - found.keys() == {"t2d", "embed_tokens.weight"}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, stored[name], atol=0, rtol=0)


def test_without_a_mapping_all_tokens_are_drafted(tmp_path: Path) -> None:
    path = eagle_head(tmp_path, TARGET)
    change(path, d2t=None, t2d=None)
    assert read(path)["d2t"].tolist() == [0] * 320


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"fc__weight": None}, "has no tensor 'fc.weight'"),
        ({"fc__weight": torch.zeros(128, 256)}, "'fc.weight' has shape"),
        ({"lm_head__weight": torch.zeros(99, 128)}, "'lm_head.weight' has shape"),
        ({"norm__weight": torch.zeros(128, dtype=torch.int8)}, "save it unquantized"),
        ({"norm__weight": torch.full((128,), float("nan"))}, "'norm.weight' has NaN"),
        ({"midlayer__mlp__gate_proj__bias": torch.zeros(192)}, "unexpected tensor"),
        ({"d2t": None}, "has no 'd2t'"),
        ({"d2t": torch.zeros(99, dtype=torch.int64)}, "must hold 100 integers"),
        ({"d2t": torch.zeros(100)}, "must hold 100 integers"),
        ({"d2t": torch.full((100,), 300)}, "outside of the vocabulary of 320"),
        ({"d2t": torch.full((100,), -1)}, "outside of the vocabulary of 320"),
        ({"d2t": torch.full((100,), 2**63 - 1)}, "outside of the vocabulary of 320"),
    ],
)
def test_what_is_refused_in_a_file(head: Path, tensors: dict[str, Any], named: str) -> None:
    change(head, **tensors)
    with pytest.raises(CheckpointError, match=named):
        read(head)


@pytest.mark.parametrize("kind", ["endless", "fifo", "directory", "missing", "cut", "huge header"])
def test_only_whole_regular_files_are_read(head: Path, kind: str) -> None:
    file = head / WEIGHTS
    content = file.read_bytes()
    file.unlink()
    if kind == "endless":
        file.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    elif kind == "cut":
        file.write_bytes(content[:-1])
    elif kind == "huge header":
        file.write_bytes((2**40).to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors (is|cannot)"):
        read(head)


def test_a_pickle_is_named_with_the_way_to_convert_it(head: Path) -> None:
    (head / WEIGHTS).rename(head / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle.*weights_only=True"):
        read(head)


def test_a_config_that_is_no_file_is_refused(head: Path) -> None:
    (head / "config.json").unlink()
    with pytest.raises(ConfigError, match="EAGLE-3"):
        read_eagle_config(head)
    os.mkfifo(head / "config.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_eagle_config(head)
