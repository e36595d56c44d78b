"""Packing alike layers together gives the same bits as packing stack by stack; what is read in pieces is what the
file holds.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.compiler.api import compile_model
from sidestream.compiler.graph.materialize import materialize
from sidestream.compiler.graph.recipe import Recipe, cat, item, param, quantize, zeros
from sidestream.compiler.options import CompileOptions
from sidestream.graphs.adapter import AdapterError, load_adapter
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora_stacks import lora_shape_for, slot_stack, slot_tensors
from sidestream.graphs.model_directory import WEIGHTS
from sidestream.runtime.adapters.packing import Packer
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_the_same_bits_as_one_by_one(tmp_path: Path, precision: Literal["int8", "fp8", "bf16"]) -> None:
    base = tiny_llama(tmp_path)
    config = LlamaConfig.from_directory(base.path)
    specs = [
        AdapterSpec(rank=20, alpha=7, targets=("q_proj", "down_proj")),
        AdapterSpec(rank=4, alpha=3, extra={"layers_to_transform": [1]}),
        AdapterSpec(rank=8, alpha=5, alpha_pattern={"layers.1.self_attn.q_proj": 9}),
    ]
    adapters = [load_adapter(path, config, 64) for path in tiny_adapters(base, specs)]
    lora = lora_shape_for(adapters, 2)
    assert lora is not None
    recipes = compile_model(
        Llama(config, lora, torch.bfloat16, "meta"), CompileOptions(precision=precision)
    ).adapter_recipes
    for adapter in adapters:
        tensors = slot_tensors(adapter, config, lora)
        expected = [
            materialize(recipe, {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}.__getitem__)[0]
            for recipe in recipes.values()
        ]
        targets = [torch.empty_like(tensor) for tensor in expected]
        for target in targets:
            target.view(torch.uint8).fill_(0xFF)
        packing = Packer(recipes, [tuple(tensor.shape) for tensor in expected])
        packing.pack(partial(slot_stack, adapter, config, lora), targets)
        for target, tensor in zip(targets, expected, strict=True):
            assert torch.equal(target.view(torch.uint8), tensor.view(torch.uint8))


def test_what_cannot_be_taken_together_is_taken_alone() -> None:
    sources = {
        f"layers.{layer}.{side}": torch.randn(4, 16, generator=torch.Generator().manual_seed(layer))
        for layer in range(6)
        for side in "ab"
    }
    recipes: dict[str, Recipe] = {}
    for layer in range(3):
        both = quantize(param(f"layers.{layer}.a"), torch.int8)
        recipes |= {f"v{layer}": item(both, 0), f"s{layer}": item(both, 1)}
        # zeros have one slot
        recipes[f"z{layer}"] = cat(1, [param(f"layers.{layer}.b"), zeros((1, 4, 16), torch.float32)])
        recipes[f"t{layer}"] = cat(1, [param(f"layers.{layer}.b"), param(f"layers.{layer + 3}.b")])  # of two layers
    expected = [materialize(recipe, lambda name: sources[name].unsqueeze(0))[0] for recipe in recipes.values()]
    targets = [torch.full_like(tensor, 77) for tensor in expected]
    packer = Packer(recipes, [tuple(tensor.shape) for tensor in expected])
    packer.pack(lambda names: torch.stack([sources[name] for name in names]), targets)
    assert all(torch.equal(target, tensor) for target, tensor in zip(targets, expected, strict=True))


def test_an_error_is_raised_when_no_group_writes_any_more() -> None:
    """The block is then reused for another adapter."""
    found: list[str] = []

    def lookup(names: Sequence[str]) -> torch.Tensor:
        (name,) = names
        if name == "layers.0.a":
            raise KeyError(name)
        found.append(name)
        return torch.ones(1, 1)

    pairs = [(f"layers.{layer}.a", f"layers.{layer + 8}.a") for layer in range(8)]  # of two layers: packed alone
    recipes = {first: cat(1, [param(first), param(second)]) for first, second in pairs}
    with pytest.raises(ValueError, match=r"no tensor 'layers\.0\.a'"):
        Packer(recipes, [(2,)] * len(pairs)).pack(lookup, [torch.empty(2) for _ in pairs])
    assert sorted(found) == sorted(name for pair in pairs[1:] for name in pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_contents_are_copied_hashed_and_checked(tmp_path: Path, dtype: torch.dtype) -> None:
    base = tiny_llama(tmp_path)
    config = LlamaConfig.from_directory(base.path)
    (path,) = tiny_adapters(base, [AdapterSpec(rank=5, alpha=7)])
    stored = {name: tensor.to(dtype) for name, tensor in load_file(path / WEIGHTS).items()}
    save_file(stored, path / WEIGHTS)
    adapter = load_adapter(path, config, 64)
    for module, pair in adapter.tensors.items():
        for side, tensor in zip("AB", pair, strict=True):
            assert tensor.dtype == dtype and torch.equal(
                tensor, stored[f"base_model.model.{module}.lora_{side}.weight"]
            )
    assert load_adapter(path, config, 64).content_hash == adapter.content_hash
    name = next(reversed(stored))
    changed = stored[name].clone()
    changed[-1, -1] += 1
    save_file({**stored, name: changed}, path / WEIGHTS)
    assert load_adapter(path, config, 64).content_hash != adapter.content_hash
    changed[-1, -1] = 65280  # the largest below 65536 that each dtype has
    save_file({**stored, name: changed}, path / WEIGHTS)
    assert load_adapter(path, config, 64).content_hash != adapter.content_hash
    for bad in (float("nan"), float("inf"), -float("inf"), -65536.0):
        changed[-1, -1] = bad
        save_file({**stored, name: changed}, path / WEIGHTS)
        with pytest.raises(AdapterError, match="NaN, infinity or magnitudes"):
            load_adapter(path, config, 64)
