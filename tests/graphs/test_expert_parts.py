"""Experts in a checkpoint: the same weights whatever their names, and every way in which they do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs.checkpoint import Checkpoint, CheckpointError, load_weights
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from support.tiny import TinyBase, tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 3, "moe_intermediate_size": 32, "num_hidden_layers": 2, "mlp_only_layers": [0]},
    "Mixtral": {"num_local_experts": 3, "intermediate_size": 32, "num_hidden_layers": 1},
    "GraniteMoe": {
        "num_local_experts": 3,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
EXPERTS = "model.layers.1.mlp.experts"


def sparse(directory: Path, family: str = "Qwen3Moe", **options: Any) -> TinyBase:
    return tiny_model(directory, family, **{"num_experts_per_tok": 2, **FAMILIES[family], **options})


def read(base: TinyBase) -> tuple[dict[str, torch.Tensor], Checkpoint]:
    """The parameters of our model after loading, and the checkpoint."""
    config = LlamaConfig.from_directory(base.path)
    model, checkpoint = Llama(config), Checkpoint(base.path, config)
    checkpoint.validate(model.checkpoint_tensors(), config.tie_word_embeddings)
    load_weights(model, checkpoint)
    return dict(model.named_parameters()), checkpoint


@pytest.mark.parametrize("size", ["5GB", "100KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_spelling_gives_the_same_weights(tmp_path: Path, family: str, size: str) -> None:
    """transformers 5 writes the names of the hub, or with `save_original_format=False` its own."""
    base = sparse(tmp_path, family, max_shard_size=size)
    whole = TinyBase(tmp_path / "whole")
    base.model.save_pretrained(whole.path, save_original_format=False, max_shard_size=size)
    assert sorted(Checkpoint(base.path).names()) != sorted(Checkpoint(whole.path).names())
    (ours, checkpoint), (theirs, other) = read(base), read(whole)
    assert sorted(checkpoint.names()) == sorted(other.names()) == sorted(ours)
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
        assert torch.equal(checkpoint.tensor(name), parameter) and checkpoint.shape(name) == tuple(parameter.shape)
    assert checkpoint.nbytes() == other.nbytes() == sum(parameter.nbytes for parameter in ours.values())
    assert {name: tensor.shape for name, tensor in checkpoint.stream()} == {n: p.shape for n, p in ours.items()}


def test_a_part_of_the_experts_is_read_without_the_rest(tmp_path: Path) -> None:
    """Gate and up rows 16 to 31 of each expert, as a rank of two has them."""
    checkpoint = read(sparse(tmp_path))[1]
    name = f"{EXPERTS}.gate_up_proj.weight"
    whole, stack = checkpoint.tensor(name), checkpoint.stored(name)
    for start in (16, 48):
        assert torch.equal(stack.narrow(1, start, 16).to(dtype=torch.float64), whole[:, start : start + 16].double())
    assert torch.equal(stack.narrow(1, 24, 16).narrow(2, 4, 8).to(), whole[:, 24:40, 4:12])
    assert torch.equal(stack.narrow(0, 1, 2).to(), whole[1:])


def edit(base: TinyBase, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = base.path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(base: TinyBase, *named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(base)
    for text in named:
        assert text in str(caught.value), str(caught.value)
    assert ": " in str(caught.value)


@pytest.mark.parametrize("lost", ["2.up_proj.weight", "0.gate_proj.weight", "1.down_proj.weight"])
def test_a_missing_expert(tmp_path: Path, lost: str) -> None:
    base = sparse(tmp_path)
    edit(base, lambda tensors: tensors.pop(f"{EXPERTS}.{lost}"))
    refused(base, f"{EXPERTS}.{lost}", "model.safetensors", "missing", "3 experts")


def test_a_missing_expert_is_named_as_mixtral_names_it(tmp_path: Path) -> None:
    base = sparse(tmp_path, "Mixtral")
    edit(base, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("w3.weight")])
    refused(base, "'model.layers.0.block_sparse_moe.experts.0.w3.weight' is missing")


def test_no_router_and_no_experts_at_all(tmp_path: Path) -> None:
    base = sparse(tmp_path)
    edit(base, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name])
    refused(base, f"{EXPERTS}.gate_up_proj.weight", "missing")
    edit(base, lambda tensors: tensors.pop("model.layers.1.mlp.gate.weight"))
    refused(base, "model.layers.1.mlp.gate.weight", "missing")


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        (f"{EXPERTS}.1.up_proj.weight", torch.ones(48, 128), "has shape [48, 128], config.json implies [32, 128]"),
        (f"{EXPERTS}.1.down_proj.weight", torch.ones(32), "has shape [32], config.json implies [128, 32]"),
        (f"{EXPERTS}.1.up_proj.weight", torch.ones(32, 128).bfloat16(), "has dtype BF16"),
        (f"{EXPERTS}.1.up_proj.weight", torch.ones(32, 128, dtype=torch.int8), "has dtype I8"),
        (f"{EXPERTS}.3.up_proj.weight", torch.ones(32, 128), "unexpected tensor"),
        (f"{EXPERTS}.01.up_proj.weight", torch.ones(32, 128), "unexpected tensor"),
        (f"{EXPERTS}.1.up_proj.bias", torch.ones(32), "unexpected tensor"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", torch.ones(3), "unexpected tensor"),
        ("model.layers.1.mlp.shared_expert_gate.weight", torch.ones(1, 128), "unexpected tensor"),
        ("model.layers.0.mlp.experts.0.up_proj.weight", torch.ones(32, 128), "is missing"),
        ("model.layers.0.mlp.gate.weight", torch.ones(3, 128), "unexpected tensor"),
        ("model.layers.1.mlp.gate.weight", torch.ones(4, 128), "[4, 128], config.json implies [3, 128]"),
        ("model.layers.1.block_sparse_moe.experts.1.w1.weight", torch.ones(32, 128), "stored twice"),
        ("model.layers.1.block_sparse_moe.gate.weight", torch.ones(3, 128), "stored twice"),
        (f"{EXPERTS}.down_proj", torch.ones(3, 128, 32), "stored twice"),
    ],
)
def test_a_tensor_that_does_not_fit(tmp_path: Path, name: str, tensor: torch.Tensor, named: str) -> None:
    base = sparse(tmp_path)
    edit(base, lambda tensors: tensors.update({name: tensor}))
    refused(base, *([] if named == "is missing" else [name, "model.safetensors: "]), named)


def test_another_number_of_experts_than_the_config_says(tmp_path: Path) -> None:
    base = sparse(tmp_path)
    fields = json.loads((base.path / "config.json").read_text())
    for count, named in ((2, "[3, 128], config.json implies [2, 128]"), (4, "down_proj.weight' is missing")):
        (base.path / "config.json").write_text(json.dumps({**fields, "num_local_experts": count}))
        refused(base, named)
