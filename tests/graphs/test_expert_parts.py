"""Experts in a checkpoint: the same weights whatever their names, and every way in which they do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.compiler.graph.materialize import quantize_weight
from sidestream.compiler.graph.recipe import cat, item, param, quantize, slice_
from sidestream.compiler.options import CompileOptions
from sidestream.graphs.checkpoint import Checkpoint, CheckpointError, load_weights
from sidestream.graphs.config import ConfigError, LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import STORED_DTYPES
from sidestream.runtime.quantization.rounded_weights import checkpoint_digest
from sidestream.runtime.worker.weight_loader import checkpoint_lookup
from sidestream.runtime.worker.weight_loader import load_weights as load_on_device
from support.compiled import CompiledRunner
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import TinyBase, tiny_model
from torch.nn.functional import kl_div, log_softmax

CPU = torch.device("cpu")
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]
FORMATS = {"int8": ("int-quantized", "int"), "fp8": ("float-quantized", "float")}
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


def config_of(base: TinyBase) -> LlamaConfig:
    return LlamaConfig.from_directory(base.path)


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
    assert torch.equal(stack.narrow(0, 1, 2).narrow(1, 8, 40).narrow(1, 16, 16).to(), whole[1:, 24:40])


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


def scheme(precision: str, ignore: list[str]) -> dict[str, Any]:
    """`quantization_config` as llm-compressor writes it."""
    layout, kind = FORMATS[precision]
    both = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**both, "strategy": "channel", "dynamic": False},
        "input_activations": {**both, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


def store(base: TinyBase, precision: str, ignore: list[str], plain: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Rewrites a checkpoint's linears in eight bits, but for those whose names contain one of `plain`. Returns the
    stored tensors.
    """
    tensors = load_file(base.path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))]:
        if any(part in name for part in plain):
            continue
        scale = (tensors[name].abs().amax(1, keepdim=True) / 127.5).bfloat16()
        whole = tensors[name] / scale.float()
        eight = torch.int8 if precision == "int8" else torch.float8_e4m3fn
        tensors[name] = (whole.round().clamp(-128, 127) if precision == "int8" else whole).to(eight)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, base.path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((base.path / "config.json").read_text())
    fields["quantization_config"] = scheme(precision, ignore)
    (base.path / "config.json").write_text(json.dumps(fields))
    return tensors


@pytest.mark.parametrize(("family", "precision"), [("Qwen3Moe", "int8"), ("Mixtral", "fp8")])
def test_experts_that_are_stored_in_eight_bits(tmp_path: Path, family: str, precision: str) -> None:
    """The values and scales are loaded as they are; the model computes with their products."""
    base = sparse(tmp_path, family, mlp_only_layers=[])
    tensors = store(base, precision, ["lm_head", "re:.*gate$", "re:.*experts.*(down_proj|w2)"], ("down_proj", "w2."))
    parameters, checkpoint = read(base)
    home = "model.layers.0.mlp.experts.gate_up_proj"
    names = ("w1", "w3") if family == "Mixtral" else ("gate_proj", "up_proj")
    stored = "model.layers.0." + ("block_sparse_moe" if family == "Mixtral" else "mlp") + ".experts.{}.{}.weight{}"
    for kind in ("", "_scale"):
        parts = [torch.cat([tensors[stored.format(expert, name, kind)] for name in names]) for expert in range(3)]
        assert torch.equal(parameters[f"{home}.weight{kind}"].float(), torch.stack(parts).float())
    assert checkpoint.stored(f"{home}.weight").dtype == STORED_DTYPES[precision]
    assert "model.layers.0.mlp.experts.down_proj.weight_scale" not in parameters
    want = PagedRunner(plain_model(base)[0], 1).step([Chunk(0, TOKENS)])[0]
    model, _ = plain_model(base, dtype=torch.bfloat16)
    runner = CompiledRunner(model, CompileOptions(precision=precision), 1)
    got = runner.step([Chunk(0, TOKENS)])[0]
    assert kl_div(log_softmax(got, -1), log_softmax(want, -1), log_target=True, reduction="batchmean") < 2e-2
    lookup, order = checkpoint_lookup(base.path, model.checkpoint_tensors(), config_of(base))
    loaded = load_on_device(runner.compiled.recipes, lookup, order, model.derived_tensors(), CPU, torch.bfloat16)
    gate_up = {name: value for name, value in loaded.items() if "layers_0_mlp_experts_gate_up" in name}
    kept, scales = sorted(gate_up.values(), key=lambda value: value.dtype.itemsize)
    assert torch.equal(kept.float(), parameters[f"{home}.weight"].float())
    assert torch.equal(scales, parameters[f"{home}.weight_scale"].squeeze(-1))


def test_a_layer_with_experts_in_eight_and_in_sixteen_bits(tmp_path: Path) -> None:
    base = sparse(tmp_path)
    tensors = store(base, "int8", ["lm_head", "re:.*mlp.gate$", f"{EXPERTS}.1.up_proj"], (f"{EXPERTS}.1.up_proj",))
    with pytest.raises(ConfigError, match=r"1\.up_proj in 16 bits, but not .*0\.gate_proj; all experts of a layer"):
        LlamaConfig.from_directory(base.path)
    fields = json.loads((base.path / "config.json").read_text())
    fields["quantization_config"] = scheme("int8", ["lm_head"])
    (base.path / "config.json").write_text(json.dumps(fields))
    scale = tensors.pop(f"{EXPERTS}.0.up_proj.weight_scale")
    save_file(tensors, base.path / "model.safetensors")
    refused(base, f"{EXPERTS}.1.up_proj.weight", "has dtype F32, but", "I8")
    edit(base, lambda found: found.update({f"{EXPERTS}.1.up_proj.weight": tensors[f"{EXPERTS}.0.up_proj.weight"]}))
    refused(base, f"{EXPERTS}.0.up_proj.weight_scale", "missing")
    edit(
        base, lambda found: [found.update({f"{EXPERTS}.{each}.up_proj.weight_scale": scale.clone()}) for each in (0, 1)]
    )
    read(base)


def test_the_parts_are_stacked_on_the_device(tmp_path: Path) -> None:
    """Nothing stacks them before: each is moved alone. A rank's rows of gate and of up are cut before that."""
    base = sparse(tmp_path)
    lookup, order = checkpoint_lookup(base.path, Llama(config_of(base)).checkpoint_tensors(), config_of(base))
    name = f"{EXPERTS}.gate_up_proj.weight"
    halves = [slice_(param(name), -2, part, 4) for part in (1, 3)]
    recipes = {"whole": param(name), "share": cat(-2, halves), "eight": item(quantize(param(name), torch.int8), 0)}
    loaded = load_on_device(recipes, lookup, order, {}, CPU, torch.float32)
    parts = [
        [base.model.state_dict()[f"{EXPERTS}.gate_up_proj"][e, 32 * h : 32 * h + 32] for h in (0, 1)] for e in range(3)
    ]
    assert torch.equal(loaded["whole"], torch.stack([torch.cat(each) for each in parts]))
    assert torch.equal(loaded["share"], torch.stack([torch.cat([gate[16:], up[16:]]) for gate, up in parts]))
    assert torch.equal(loaded["eight"], quantize_weight(loaded["whole"], torch.int8)[0])
    meta = load_on_device({"whole": param(name)}, lookup, order, {}, torch.device("meta"), torch.float32)
    assert meta["whole"].device.type == "meta" and meta["whole"].shape == (3, 64, 128)


def test_the_digest_changes_with_any_expert(tmp_path: Path) -> None:
    base = sparse(tmp_path)
    config = config_of(base)
    first = checkpoint_digest(Checkpoint(base.path, config))
    assert first == checkpoint_digest(Checkpoint(base.path, config))
    edit(base, lambda tensors: tensors[f"{EXPERTS}.2.down_proj.weight"].add_(1.0))
    assert checkpoint_digest(Checkpoint(base.path, config)) != first
