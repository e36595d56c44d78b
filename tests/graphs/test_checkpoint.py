"""Checkpoints on disk: single and sharded, and every way in which they come broken."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.graphs.checkpoint import Checkpoint, CheckpointError, load_weights
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from support.tiny import TinyBase, tiny_llama, tiny_model

SHARD = "200KB"


def test_parts_of_packed_tensors_are_there_under_plain_names(tmp_path: Path) -> None:
    packed = tiny_model(tmp_path, "Phi3", pad_token_id=0, hidden_size=256, num_hidden_layers=1)
    config = LlamaConfig.from_directory(packed.path)
    checkpoint = Checkpoint(packed.path, config)
    theirs = packed.model.state_dict()["model.layers.0.self_attn.qkv_proj.weight"]
    parts = [checkpoint.tensor(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qkv"]
    assert torch.equal(torch.cat(parts), theirs)
    assert sorted(checkpoint.names()) == sorted(Llama(config, device="meta").checkpoint_tensors())
    assert checkpoint.nbytes() == Checkpoint(packed.path).nbytes()
    fields = json.loads((packed.path / "config.json").read_text())
    other = LlamaConfig.from_dict({**fields, "num_key_value_heads": 1})
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight' has shape \[512, 256\], config.json implies 384 rows"):
        Checkpoint(packed.path, other)


def expected(base: TinyBase) -> tuple[dict[str, tuple[int, ...]], bool]:
    config = LlamaConfig.from_directory(base.path)
    return Llama(config, device="meta").checkpoint_tensors(), config.tie_word_embeddings


@pytest.fixture
def single(tmp_path: Path) -> TinyBase:
    return tiny_llama(tmp_path, num_hidden_layers=1)


@pytest.fixture
def sharded(tmp_path: Path) -> TinyBase:
    return tiny_llama(tmp_path, num_hidden_layers=1, max_shard_size=SHARD)


def edit(base: TinyBase, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = base.path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("size", ["5GB", SHARD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_as_saved(tmp_path: Path, size: str, dtype: torch.dtype) -> None:
    base = tiny_llama(tmp_path, max_shard_size=size, dtype=dtype)
    checkpoint = Checkpoint(base.path)
    shapes, tied = expected(base)
    checkpoint.validate(shapes, tied)
    model = Llama(LlamaConfig.from_directory(base.path))
    assert model.dtype == dtype
    load_weights(model, checkpoint)
    theirs = base.model.state_dict()
    assert sorted(checkpoint.names()) == sorted(theirs)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.float(), theirs[name]), name
        assert checkpoint.shape(name) == tuple(theirs[name].shape)
    assert checkpoint.nbytes() == sum(parameter.nbytes for parameter in model.parameters())


def test_stream_reads_shard_after_shard(sharded: TinyBase) -> None:
    checkpoint = Checkpoint(sharded.path)
    homes = json.loads((sharded.path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(homes.values())) > 2
    order = [homes[name] for name, _ in checkpoint.stream()]
    assert order == sorted(order)
    wanted = {"model.norm.weight", "lm_head.weight"}
    assert {name for name, _ in checkpoint.stream(wanted)} == wanted


def refused(base: TinyBase, *named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(base.path).validate(*expected(base))
    for text in named:
        assert text in str(caught.value), str(caught.value)
    assert ": " in str(caught.value)


def test_missing_shard(sharded: TinyBase) -> None:
    lost = sorted(sharded.path.glob("model-*.safetensors"))[1]
    lost.unlink()
    refused(sharded, lost.name, "shards missing", "download or copy it again")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(single: TinyBase, keep: int) -> None:
    path = single.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(single, "model.safetensors", "truncated", "again")


def test_truncated_shard(sharded: TinyBase) -> None:
    path = sorted(sharded.path.glob("model-*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-8])
    refused(sharded, path.name, "truncated")


def test_missing_tensor(single: TinyBase) -> None:
    edit(single, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    refused(single, "model.layers.0.mlp.up_proj.weight", "model.safetensors", "missing")


def test_missing_head_suggests_tying(single: TinyBase) -> None:
    edit(single, lambda tensors: tensors.pop("lm_head.weight"))
    refused(single, "lm_head.weight", "tie_word_embeddings")


def test_the_base_without_its_head_suggests_the_whole_model(single: TinyBase) -> None:
    edit(
        single, lambda tensors: tensors.update({name.removeprefix("model."): tensors.pop(name) for name in [*tensors]})
    )
    refused(
        single, "'model.embed_tokens.weight'", "'embed_tokens.weight', so AutoModel saved them", "AutoModelForCausalLM"
    )


def test_wrong_shape(single: TinyBase) -> None:
    edit(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64)}))
    refused(single, "model.safetensors", "model.norm.weight", "[64]", "[128]")


def test_quantized_tensor(single: TinyBase) -> None:
    edit(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(128, dtype=torch.int8)}))
    refused(single, "model.norm.weight", "I8", "unquantized")
    edit(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(128, dtype=torch.float64)}))
    refused(single, "model.norm.weight", "F64", "one of BF16, F16, F32", "in one of these")


def test_unknown_tensor(single: TinyBase) -> None:
    edit(single, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(256)}))
    refused(single, "model.layers.0.self_attn.q_proj.bias", "unexpected")


def test_more_layers_than_the_config_says(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    config = json.loads((base.path / "config.json").read_text())
    (base.path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    refused(base, "model.layers.1.", "unexpected")


def test_harmless_extras_pass(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path, num_hidden_layers=1, tie_word_embeddings=True)
    edit(
        base,
        lambda tensors: tensors.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32),
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
            }
        ),
    )
    Checkpoint(base.path).validate(*expected(base))


def test_index_and_shards_of_different_downloads(sharded: TinyBase) -> None:
    index = sharded.path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    name = next(name for name, shard in content["weight_map"].items() if shard == shards[0])
    content["weight_map"][name] = shards[1]
    index.write_text(json.dumps(content))
    refused(sharded, name, shards[1])


def test_a_tensor_in_two_shards(sharded: TinyBase) -> None:
    first, second, *_ = sorted(sharded.path.glob("model-*.safetensors"))
    tensors = {**load_file(first), **load_file(second)}
    save_file(tensors, second)
    refused(sharded, first.name, second.name)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "model.bin"])
def test_index_that_leads_elsewhere(sharded: TinyBase, shard: str) -> None:
    (sharded.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    refused(sharded, shard, "which is not a .safetensors file in this directory")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "nonsense"])
def test_broken_index(sharded: TinyBase, content: str) -> None:
    (sharded.path / "model.safetensors.index.json").write_text(content)
    refused(sharded, "model.safetensors.index.json")


def test_pickles_are_never_loaded(single: TinyBase) -> None:
    (single.path / "model.safetensors").rename(single.path / "pytorch_model.bin")
    refused(single, "pytorch_model.bin", "safe_serialization")


def test_shards_without_their_index(sharded: TinyBase) -> None:
    (sharded.path / "model.safetensors.index.json").unlink()
    refused(sharded, "model-00001-of", "model.safetensors.index.json", "download or copy the index too")


def test_empty_and_missing_directories(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint(tmp_path / "nowhere")


def test_asking_for_an_unknown_tensor(single: TinyBase) -> None:
    with pytest.raises(CheckpointError, match=r"'nothing' is not in model\.safetensors"):
        Checkpoint(single.path).tensor("nothing")
