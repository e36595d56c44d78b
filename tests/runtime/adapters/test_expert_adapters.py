"""Adapters on experts in an engine: files with tens of thousands of tensors, packing of stacks, sums."""

import json
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from sidestream.compiler.api import compile_model
from sidestream.compiler.graph.materialize import materialize
from sidestream.compiler.options import CompileOptions
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.adapter_config import CONFIG, AdapterError
from sidestream.graphs.checkpoint import checkpoint_config
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora_stacks import lora_shape_for, slot_stack, slot_tensors
from sidestream.graphs.model_directory import WEIGHTS
from sidestream.runtime.adapters import packing, registry
from sidestream.runtime.adapters.describer import AdapterDescriber
from sidestream.runtime.adapters.packing import Packer
from sidestream.runtime.adapters.registry import AdapterRegistry
from sidestream.runtime.adapters.weighted_sum import sum_obstacle
from support.expert_adapters import DOWN, GATE_UP, PREFIX, on_parameters, one_by_one, tiny_moe
from support.tiny import TinyBase


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_moe(tmp_path_factory.mktemp("experts"), "Qwen3Moe")


def sparse_config(layers: int, experts: int) -> LlamaConfig:
    """Small layers with many experts of gate_up_proj [32, 16] and down_proj [16, 16]."""
    return LlamaConfig(64, 16, 16, layers, 1, 1, 64, num_experts=experts, expert_intermediate_size=16)


def write_zeros(path: Path, names: list[str]) -> None:
    """An adapter with A [1, 16] and B [16, 1] for each module."""
    header, end = {}, 0
    for name in names:
        for side, shape in (("A", [1, 16]), ("B", [16, 1])):
            offsets = [end, end := end + 32]
            header[f"{PREFIX}{name}.lora_{side}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    path.mkdir()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    fields = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (path / CONFIG).write_text(json.dumps(fields))


def experts_of(layers: int, experts: int) -> list[str]:
    return [
        f"model.layers.{layer}.mlp.experts.{expert}.{linear}"
        for layer in range(layers)
        for expert in range(experts)
        for linear in ("gate_proj", "up_proj", "down_proj")
    ]


def test_twenty_thousand_tensors_are_described_in_another_process(tmp_path: Path) -> None:
    layers, experts = 26, 128
    write_zeros(tmp_path / "adapter", experts_of(layers, experts))
    describer = AdapterDescriber(seconds=300)
    found = describer(tmp_path / "adapter", sparse_config(layers, experts), 16, False, None)
    describer.close()
    assert len(found.layout.places) == 2 * len(found.pairs) == 2 * 3 * layers * experts


def test_the_number_of_tensors_is_bounded_by_the_base(tmp_path: Path) -> None:
    """Experts that do not exist are named; of many more, none is read."""
    config = sparse_config(2, 8)
    for experts, message in ((9, "is for expert 8, but the base has experts 0 to 7"), (64, "at most .* another base")):
        write_zeros(tmp_path / f"adapter{experts}", experts_of(2, experts))
        with pytest.raises(AdapterError, match=message):
            load_adapter(tmp_path / f"adapter{experts}", config, 16)


def test_stacks_of_experts_are_packed_layer_by_layer(base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """In eight bits with a scale a row, and the same bits as stack by stack."""
    config = checkpoint_config(base.path)
    paths = [on_parameters(base, GATE_UP, DOWN, "gate.weight", rank=5), one_by_one(base, use_rslora=True)]
    adapters = [load_adapter(path, config, 64) for path in paths]
    lora = lora_shape_for(adapters, 2)
    assert lora is not None
    recipes = compile_model(Llama(config, lora, torch.bfloat16, "meta"), CompileOptions()).adapter_recipes
    monkeypatch.setattr(packing, "GROUP_ELEMENTS", 6 * 32 * 128)  # gate_up_proj's A: two layers would be twice this
    for adapter in adapters:
        tensors = {name: tensor.unsqueeze(0) for name, tensor in slot_tensors(adapter, config, lora).items()}
        assert len(tensors) == 2 * 2 * 3
        expected = [materialize(recipe, tensors.__getitem__)[0] for recipe in recipes.values()]
        targets = [torch.full_like(tensor, 77) for tensor in expected]
        Packer(recipes, [tuple(tensor.shape) for tensor in expected]).pack(
            partial(slot_stack, adapter, config, lora), targets
        )
        for name, target, tensor in zip(recipes, targets, expected, strict=True):
            assert torch.equal(target, tensor), name
            assert bool(tensor.any()) == (adapter.rank > 0 or "mlp_gate_lora" not in name), name
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in zip(recipes, expected, strict=True)}
    stack = "b_model_layers_2_mlp_experts_gate_up_proj_lora_a"
    assert shapes[f"{stack}_int8"] == ((6, 32, 128), torch.int8)
    assert shapes[f"{stack}_scale"] == ((6, 32), torch.float32)


def test_sums_leave_experts_out(base: TinyBase) -> None:
    config = checkpoint_config(base.path)
    experts = load_adapter(on_parameters(base, DOWN), config, 64)
    router = load_adapter(on_parameters(base, "gate.weight", targets=["q_proj"]), config, 64)
    assert "experts_down" in sum_obstacle(experts) and not sum_obstacle(router)


def test_tensors_that_wait_for_their_first_read_are_bounded(base: TinyBase, monkeypatch: pytest.MonkeyPatch) -> None:
    config = checkpoint_config(base.path)
    paths = [on_parameters(base, GATE_UP, DOWN), on_parameters(base, GATE_UP)]
    monkeypatch.setattr(registry, "UNREAD_BYTES", load_adapter(paths[0], config, 64).nbytes)
    found = AdapterRegistry(config, 64, keep=8)
    for name, path in zip("ab", paths, strict=True):
        found.add(name, path)
    reads: list[str] = []
    load = AdapterRegistry._load
    monkeypatch.setattr(
        AdapterRegistry, "_load", lambda *args, **keys: (reads.append(args[1].name), load(*args, **keys))[1]
    )
    tensors = [found.read(number).tensors for number in found.numbers.values()]
    assert all(tensors) and reads == [paths[1].name], "only the second is read again"
