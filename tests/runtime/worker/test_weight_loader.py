"""Weights are read in file order, each once, and a recipe's intermediate results are freed before the next one."""

import torch
from sidestream.compiler.graph.materialize import quantize_weight
from sidestream.compiler.graph.recipe import cat, item, param, quantize, unsqueeze
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.lora import LoraShape
from sidestream.runtime.adapters.registry import AdapterRegistry
from sidestream.runtime.adapters.slot_loader import SlotLoader
from sidestream.runtime.worker.weight_loader import dummy_lookup, load_weights
from support.tiny import TINY, AdapterSpec, tiny_adapters, tiny_llama

CPU = torch.device("cpu")


def test_each_tensor_is_read_once_in_file_order():
    stored = {name: torch.randn(4, 8) for name in ("a", "b", "c", "d")}
    packed = quantize(cat(0, [param("b"), param("c")]))
    recipes = {
        "scale": item(packed, 1),
        "last": param("d"),
        "frequencies": param("f"),
        "weight": item(packed, 0),
        "first": param("a"),
    }
    reads = []

    def lookup(name):
        reads.append(name)
        return stored[name]

    weights = load_weights(recipes, lookup, ["a", "b", "c", "d"], {"f": torch.arange(3.0)}, CPU, torch.float32)
    assert reads == ["a", "b", "c", "d"]
    values, scales = quantize_weight(torch.cat([stored["b"], stored["c"]]))
    assert torch.equal(weights["weight"].view(torch.uint8), values.view(torch.uint8)) and torch.equal(
        weights["scale"], scales
    )
    assert torch.equal(weights["frequencies"], torch.arange(3.0)) and torch.equal(weights["last"], stored["d"])


def test_random_weights_depend_on_name_and_seed_only():
    expected = {"model.norm.weight": (8,), "x": (16, 8), "y": (16, 8)}
    lookup, names = dummy_lookup(expected, CPU, torch.bfloat16, 0)
    assert names == list(expected) and lookup("x").dtype == torch.bfloat16
    first = lookup("x")
    lookup("y")
    assert torch.equal(lookup("x"), first) and not torch.equal(lookup("y"), first)
    assert not torch.equal(dummy_lookup(expected, CPU, torch.bfloat16, 1)[0]("x"), first)
    assert (lookup("model.norm.weight") == 1).all()


def test_adapters_are_packed_into_their_slot_and_the_oldest_copies_dropped(tmp_path):
    base = tiny_llama(tmp_path, num_hidden_layers=1)
    paths = tiny_adapters(base, [AdapterSpec(rank=4, alpha=8, targets=("q_proj", "v_proj")), AdapterSpec(rank=16)])
    config = LlamaConfig.from_directory(base.path)
    registry = AdapterRegistry(config, 16)
    numbers = [registry.add(f"a{index}", path).number for index, path in enumerate(paths)]
    lora = LoraShape(3, 16)
    prefix = "model.layers.0.self_attn."
    q_b = param(f"{prefix}q_proj.lora_b")
    recipes = {
        "qkv_a": cat(1, [param(f"{prefix}{name}_proj.lora_a") for name in "qkv"]),
        "q_b": q_b,
        "wide": unsqueeze(q_b, 1),
    }
    hidden = TINY["hidden_size"]
    stacks = {"qkv_a": torch.zeros(3, 48, hidden), "q_b": torch.zeros(3, 256, 16), "wide": torch.zeros(3, 1, 256, 16)}
    slots = SlotLoader(recipes, stacks, registry, lora, max_cpu_adapters=1)
    adapter = registry._unread[numbers[0]]
    slots.load(2, numbers[0])
    assert not registry.by_number(numbers[0]).adapter.tensors and numbers[0] not in registry._unread, (
        "host memory holds it once"
    )
    a, b = adapter.tensors[f"{prefix}q_proj"]
    assert (
        torch.equal(stacks["qkv_a"][2, :4], a)
        and (stacks["qkv_a"][2, 4:32] == 0).all()
        and stacks["qkv_a"][2, 32:36].any()
    )
    assert torch.equal(stacks["q_b"][2, :, :4], b * 2.0) and torch.equal(stacks["wide"][2, 0], stacks["q_b"][2])
    assert (stacks["qkv_a"][:2] == 0).all()
    slots.load(0, numbers[1])
    assert slots.store.numbers == [numbers[1]]
    slots.load(2, numbers[1])
    assert torch.equal(stacks["qkv_a"][2], stacks["qkv_a"][0]), "nothing of the former adapter is left"
    registry.remove("a0")
    assert registry.add("a0", paths[0]).number not in numbers
