"""Stacks: rank buckets, packed targets, and the scaling folded into B before it is rounded."""

from itertools import cycle

import pytest
import torch
from sidestream.graphs.adapter import Adapter, load_adapter
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from sidestream.graphs.lora_stacks import fill_slot, lora_shape_for, slot_tensor, slot_tensors
from support.lora import stack_shapes
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="module")
def config(base: TinyBase) -> LlamaConfig:
    return LlamaConfig.from_directory(base.path)


@pytest.fixture(scope="module")
def adapters(base: TinyBase, config: LlamaConfig) -> list[Adapter]:
    specs = [
        AdapterSpec(rank=20, alpha=7, targets=("q_proj",)),
        AdapterSpec(rank=4, alpha=3, targets=("down_proj",), extra={"layers_to_transform": [1]}),
    ]
    return [load_adapter(path, config, 64) for path in tiny_adapters(base, specs)]


def test_shape_covers_all_adapters(adapters: list[Adapter]) -> None:
    assert lora_shape_for(adapters, 5) == LoraShape(5, 32, ("q_proj", "k_proj", "v_proj", "down_proj"))
    assert lora_shape_for(adapters[1:], 1, 16) == LoraShape(1, 16, ("down_proj",))
    assert lora_shape_for(adapters[1:], 1, 40) == LoraShape(1, 48, ("down_proj",)), "later ones may have more"
    assert lora_shape_for([], 4) is None
    with pytest.raises(ValueError, match="max_lora_rank"):
        lora_shape_for(adapters, 5, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slot_tensors_are_padded_and_scaled_in_fp32(
    adapters: list[Adapter], config: LlamaConfig, dtype: torch.dtype
) -> None:
    lora = lora_shape_for(adapters, 2)
    assert lora is not None
    model = Llama(config, lora, dtype, "meta")
    tensors = slot_tensors(adapters[0], config, lora, dtype)
    assert {name: (lora.slots, *tensor.shape) for name, tensor in tensors.items()} == stack_shapes(model)
    assert all(tensor.dtype == dtype for tensor in tensors.values())
    module = "model.layers.1.self_attn.q_proj"
    a, b = adapters[0].tensors[module]
    assert torch.equal(tensors[f"{module}.lora_a"][:20], a.to(dtype))
    # b is fp32: one rounding, after the product
    assert torch.equal(tensors[f"{module}.lora_b"][:, :20], (b * (7 / 20)).to(dtype))
    assert not tensors[f"{module}.lora_a"][20:].any()
    assert not tensors[f"{module}.lora_b"][:, 20:].any()
    for name, tensor in tensors.items():
        assert bool(tensor.any()) == ("q_proj" in name), name
    second = slot_tensors(adapters[1], config, lora, dtype)
    assert [name for name, tensor in second.items() if tensor.any()] == [
        "model.layers.1.mlp.down_proj.lora_a",
        "model.layers.1.mlp.down_proj.lora_b",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_b_is_rounded_once(config: LlamaConfig, stored: torch.dtype, dtype: torch.dtype) -> None:
    """All normal 16-bit values and some scalings: the bits are those of the product in fp32."""
    module = "model.layers.0.self_attn.q_proj"
    outputs, inputs = config.module_shape(module)
    every = torch.arange(0x0400, 0x7800, dtype=torch.int16).view(stored if stored.itemsize == 2 else torch.bfloat16)
    values = every[(every.float() < 1e4) & (every.float() > 1e-6)].to(stored)
    lora = LoraShape(1, 16, ("q_proj",))
    for scaling, part in zip(cycle((7 / 20, 1 / 3, 2.0, 2**0.5)), values.split(outputs * 16), strict=False):
        b = torch.zeros(outputs * 16, dtype=stored)
        b[: len(part)] = part
        adapter = Adapter(
            16, {module: scaling}, {module: (torch.zeros(16, inputs), b.view(outputs, 16))}, ("q_proj",), ""
        )
        slot = slot_tensor(adapter, config, lora, f"{module}.lora_b", dtype)
        assert torch.equal(slot, (b.float() * scaling).to(dtype).view(outputs, 16))


def test_an_adapter_that_does_not_fit(adapters: list[Adapter], config: LlamaConfig) -> None:
    with pytest.raises(ValueError, match="rank 20 on q_proj does not fit stacks of rank 16"):
        slot_tensors(adapters[0], config, LoraShape(1, 16))
    with pytest.raises(ValueError, match="does not fit stacks of rank 32 on o_proj"):
        slot_tensors(adapters[0], config, LoraShape(1, 32, ("o_proj",)))


def test_filling_a_slot_leaves_nothing_of_the_last_tenant(adapters: list[Adapter], config: LlamaConfig) -> None:
    lora = lora_shape_for(adapters, 2)
    assert lora is not None
    model = Llama(config, lora, torch.float32)
    for adapter in adapters:
        fill_slot(model, 1, slot_tensors(adapter, config, lora, torch.float32))
    expected = slot_tensors(adapters[1], config, lora, torch.float32)
    stacks = {name: buffer for name, buffer in model.named_buffers() if name in expected}
    assert stacks.keys() == expected.keys()
    for name, stack in stacks.items():
        assert torch.equal(stack[1], expected[name]), name
        assert not stack[0].any()
