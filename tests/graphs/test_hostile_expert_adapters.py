"""Adapters on experts that cannot be served exactly: each is refused, with the tensor or field and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.adapter_config import CONFIG, AdapterError
from sidestream.graphs.adapter_description import describe_adapter
from sidestream.graphs.checkpoint import checkpoint_config
from support.expert_adapters import DOWN, GATE_UP, PREFIX, Tensors, on_parameters, one_by_one, read, tiny_moe, write
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

LAYER = f"{PREFIX}model.layers.0.mlp"
OUTER, INNER = f"{LAYER}.experts", f"{LAYER}.experts.base_layer"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    """Experts: 6 of gate_up_proj [96, 128] and down_proj [128, 48]; layer 1 of 3 is dense."""
    return tiny_moe(tmp_path_factory.mktemp("hostile"), "Qwen3Moe")


@pytest.fixture(scope="module")
def stacked(base: TinyBase) -> tuple[Tensors, dict[str, Any]]:
    return read(on_parameters(base, GATE_UP, DOWN, "gate.weight", rank=4))


@pytest.fixture(scope="module")
def single(base: TinyBase) -> tuple[Tensors, dict[str, Any]]:
    return read(one_by_one(base))


def load(base: TinyBase, tensors: Tensors, fields: dict[str, Any]) -> Any:
    return load_adapter(write(base, tensors, fields), checkpoint_config(base.path), 64)


def renamed(name: str, other: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def replaced(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def filled(name: str, value: float) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.full_like(tensors[name], value)})


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: (tensors.pop(name), None)[1]


def both(one: Callable[[Tensors], None], other: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    return lambda tensors: (one(tensors), other(tensors), None)[2]


STACKED: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "A alone": (without(f"{OUTER}.lora_B.weight"), r"mlp\.experts has lora_A but no lora_B"),
    "renamed": (renamed(f"{OUTER}.lora_B.weight", f"{OUTER}.lora_C.weight"), r"experts\.lora_C\.weight' is not LoRA"),
    "other module": (
        renamed(f"{LAYER}.gate.lora_A.weight", f"{LAYER}.shared_expert_gate.lora_A.weight"),
        "shared_expert_gate",
    ),
    "NaN": (filled(f"{INNER}.lora_B.weight", float("nan")), r"base_layer\.lora_B\.weight' has NaN"),
    "other rank": (
        both(replaced(f"{OUTER}.lora_A.weight", 30, 48), replaced(f"{OUTER}.lora_B.weight", 128, 30)),
        "down_proj has rank 5, but adapter_config.json has 4",
    ),
    "ranks of A and B": (replaced(f"{OUTER}.lora_B.weight", 128, 30), r"A \[24, 48\] and B \[128, 30\], but the base"),
    "more experts": (
        both(replaced(f"{OUTER}.lora_A.weight", 32, 48), replaced(f"{OUTER}.lora_B.weight", 128, 32)),
        r"but the base has 6 experts with gate_up_proj \[96, 128\].*another base",
    ),
    "twice the experts": (
        both(replaced(f"{OUTER}.lora_A.weight", 48, 48), replaced(f"{OUTER}.lora_B.weight", 128, 48)),
        "down_proj has rank 8, but adapter_config.json has 4",
    ),
    "no rank": (
        both(replaced(f"{OUTER}.lora_A.weight", 0, 48), replaced(f"{OUTER}.lora_B.weight", 128, 0)),
        r"A \[0, 48\] and B \[128, 0\]",
    ),
    "wider experts": (
        both(replaced(f"{OUTER}.lora_A.weight", 24, 64), replaced(f"{OUTER}.lora_B.weight", 128, 24)),
        "another base",
    ),
    "two releases": (
        both(replaced(f"{OUTER}.lora_A.weight", 24, 128), replaced(f"{OUTER}.lora_B.weight", 48, 24)),
        "layouts of two releases of peft",
    ),
    "a stack twice": (
        both(replaced(f"{INNER}.lora_A.weight", 24, 48), replaced(f"{INNER}.lora_B.weight", 128, 24)),
        r"LoRA on model\.layers\.0\.mlp\.experts\.down_proj twice",
    ),
    "a stack and one of its experts": (
        both(
            replaced(f"{OUTER}.0.down_proj.lora_A.weight", 4, 48),
            replaced(f"{OUTER}.0.down_proj.lora_B.weight", 128, 4),
        ),
        r"LoRA on model\.layers\.0\.mlp\.experts\.down_proj twice",
    ),
    "three dimensions": (
        both(replaced(f"{INNER}.lora_A.weight", 6, 4, 128), replaced(f"{INNER}.lora_B.weight", 96, 4, 6)),
        "SkyRL and Megatron.*export one LoRA for each expert",
    ),
    "SkyRL": (
        both(
            replaced(f"{OUTER}.gate_up_proj.lora_A.weight", 6, 4, 128),
            replaced(f"{OUTER}.gate_up_proj.lora_B.weight", 6, 96, 4),
        ),
        "all experts in one tensor, as in SkyRL's export: export one LoRA",
    ),
    "shared outer": (replaced(f"{OUTER}.w1.lora_A.weight", 1, 4, 128), "as in SGLang's shared outer experts"),
    "magnitude": (replaced(f"{OUTER}.lora_magnitude_vector", 128), "of a router or expert, for which only LoRA"),
    "bias": (replaced(f"{LAYER}.gate.lora_B.bias", 6), "of a router or expert, for which only LoRA"),
    "router's shape": (replaced(f"{LAYER}.gate.lora_B.weight", 8, 4), r"mlp\.gate maps 128 to 8 features.* 128 to 6"),
    "dense layer": (
        renamed(f"{OUTER}.lora_A.weight", f"{PREFIX}model.layers.1.mlp.experts.lora_A.weight"),
        r"layers\.1\.mlp\.experts\.lora_A\.weight' is not LoRA A or B",
    ),
}


@pytest.mark.parametrize("name", STACKED)
def test_stacks_that_do_not_fit_are_refused(base: TinyBase, stacked: tuple[Tensors, dict[str, Any]], name: str) -> None:
    change, message = STACKED[name]
    tensors = dict(stacked[0])
    change(tensors)
    with pytest.raises(AdapterError, match=message):
        load(base, tensors, stacked[1])


ONE = f"{LAYER}.experts.2.up_proj"
SINGLE: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "B alone": (without(f"{ONE}.lora_A.weight"), r"experts\.2\.up_proj has lora_B but no lora_A"),
    "an expert too many": (
        renamed(f"{ONE}.lora_A.weight", f"{LAYER}.experts.6.up_proj.lora_A.weight"),
        r"is for expert 6, but the base has experts 0 to 5",
    ),
    "a huge number": (
        renamed(f"{ONE}.lora_A.weight", f"{LAYER}.experts.{'9' * 5000}.up_proj.lora_A.weight"),
        "is not LoRA A or B",
    ),
    "a huge layer": (
        renamed(f"{ONE}.lora_A.weight", f"{PREFIX}model.layers.{'9' * 5000}.mlp.experts.0.up_proj.lora_A.weight"),
        "is not LoRA A or B",
    ),
    "two spellings": (
        replaced(f"{PREFIX}model.layers.0.block_sparse_moe.experts.02.w3.lora_A.weight", 4, 128),
        r"both lora_A of model\.layers\.0\.mlp\.experts\.2\.up_proj",
    ),
    "other rank": (
        both(replaced(f"{ONE}.lora_A.weight", 8, 128), replaced(f"{ONE}.lora_B.weight", 48, 8)),
        r"experts\.2\.up_proj has rank 8, but adapter_config.json has 4",
    ),
    "dense layer": (
        replaced(f"{PREFIX}model.layers.1.mlp.experts.0.up_proj.lora_A.weight", 4, 128),
        "but layer 1 of the base has none",
    ),
    "layer too many": (
        replaced(f"{PREFIX}model.layers.3.mlp.experts.0.up_proj.lora_A.weight", 4, 128),
        "is for layer 3 of 3",
    ),
    "sparse layer": (replaced(f"{LAYER}.up_proj.lora_A.weight", 4, 128), r"mlp\.up_proj\.lora_A\.weight' is not"),
    "infinity": (filled(f"{ONE}.lora_B.weight", float("inf")), r"experts\.2\.up_proj\.lora_B\.weight' has NaN, inf"),
    "whole router": (replaced(f"{LAYER}.gate.weight", 6, 128), r"mlp\.gate\.weight' is not LoRA"),
}


@pytest.mark.parametrize("name", SINGLE)
def test_experts_that_do_not_fit_are_refused(base: TinyBase, single: tuple[Tensors, dict[str, Any]], name: str) -> None:
    change, message = SINGLE[name]
    tensors = dict(single[0])
    change(tensors)
    with pytest.raises(AdapterError, match=message):
        load(base, tensors, single[1])


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"target_parameters": ["experts.gate_up_proj", "q_proj.weight"]}, "target_parameters names 'q_proj.weight'"),
    ({"target_parameters": ["weight"]}, "target_parameters names 'weight'"),
    ({"target_parameters": "("}, "target_parameters names .a name of 1 char"),
    ({"target_parameters": [1]}, "target_parameters must be a string or a list of strings"),
    ({"target_parameters": ["gate.weight"] * 5000}, "target_parameters has 5000 entries"),
    ({"use_dora": True}, "use_dora = True, but model.* has no lora_magnitude_vector"),
    ({"lora_bias": True}, r"lora_bias = True, but model.* has no lora_B\.bias"),
    ({"modules_to_save": ["gate"]}, "modules_to_save names 'gate'"),
    (
        {"alora_invocation_tokens": [5, 6]},
        "alora_invocation_tokens is not supported with LoRA on the parameter 'experts.down_proj'.*train it without",
    ),
    ({"alora_invocation_tokens": [5], "target_parameters": None}, "LoRA on the parameter 'model.layers.0.mlp.experts"),
    ({"r": 8}, "rank 4, but adapter_config.json has 8"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_fields_that_mean_something_else_are_refused(
    base: TinyBase, stacked: tuple[Tensors, dict[str, Any]], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        load(base, stacked[0], {**stacked[1], **fields})


def test_contradictions_to_the_config_are_named(base: TinyBase, stacked: tuple[Tensors, dict[str, Any]]) -> None:
    assert load(base, *stacked).differences == ()
    more = {**stacked[1], "target_parameters": ["mlp.gate.weight", "experts.down_proj"]}
    (difference,) = load(base, stacked[0], more).differences
    assert difference.startswith("2 modules have tensors and are not targeted") and "gate_up_proj" in difference
    fewer = {name: tensor for name, tensor in stacked[0].items() if ".gate." not in name}
    (difference,) = load(base, fewer, stacked[1]).differences
    assert difference.startswith("2 modules targeted") and "layers.0.mlp.gate" in difference


def test_a_dense_base_refuses_adapters_of_experts(tmp_path: Path, single: tuple[Tensors, dict[str, Any]]) -> None:
    base = tiny_llama(tmp_path)
    with pytest.raises(AdapterError, match="is not LoRA A or B of a projection of this base"):
        load(base, *single)
    plain = tiny_adapters(base, [AdapterSpec()])[0]
    fields = json.loads((plain / CONFIG).read_text())
    with pytest.raises(AdapterError, match="target_parameters is set: LoRA on bare parameters"):
        load(base, read(plain)[0], {**fields, "target_parameters": ["experts.down_proj"]})


def test_descriptions_are_checked_again(base: TinyBase, stacked: tuple[Tensors, dict[str, Any]]) -> None:
    """Those of another process: a layout of another name or for other shapes."""
    config = checkpoint_config(base.path)
    found = describe_adapter(write(base, *stacked), config, 64)
    found.check(config, 64)
    for change in ({"stacked": "other"}, {"stacked": ""}, {"stacked": "transposed"}):
        with pytest.raises(ValueError):
            msgspec.structs.replace(found, **change).check(config, 64)
    with pytest.raises(ValueError, match="rank above the limit"):
        found.check(config, 3)
