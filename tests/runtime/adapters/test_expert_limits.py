"""Limits of an engine's adapters if the base has experts: targets, slots, memory."""

from dataclasses import replace

import pytest
from sidestream.compiler.options import OptionError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.families import ATTENTION_MODULES, EXPERT_TARGETS
from sidestream.graphs.lora import LoraShape
from sidestream.runtime.adapters.adapter_limits import model_targets, slots_within
from sidestream.runtime.engine.options import PROJECTIONS, target_modules
from sidestream.tools.options.models import LLAMA_8B

DENSE = LlamaConfig.from_dict(LLAMA_8B)
SPARSE = replace(  # the shape of Qwen3-30B-A3B
    DENSE,
    hidden_size=2048,
    num_hidden_layers=48,
    num_experts=128,
    num_experts_per_tok=8,
    expert_intermediate_size=768,
)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("named", "adapters", "targets"),
    [
        (None, True, None),  # those of the adapters
        (None, False, (*PROJECTIONS, *EXPERT_TARGETS)),
        ("all", True, (*PROJECTIONS, *EXPERT_TARGETS)),
        (["qkv_proj", "o_proj"], False, ATTENTION_MODULES),
        (["experts_down", "router"], True, ("experts_down", "router")),
    ],
)
def test_all_projections_include_the_experts_of_a_model_that_has_some(named, adapters, targets) -> None:
    assert model_targets(SPARSE, target_modules(named), adapters) == targets


def test_a_dense_model_has_the_targets_that_are_named() -> None:
    for named in (None, "all", ["qkv_proj"]):
        assert model_targets(DENSE, target_modules(named), False) == target_modules(named)
    with pytest.raises(OptionError, match="names experts_down, but the model has no experts; leave these names out"):
        model_targets(DENSE, target_modules(["q_proj", "experts_down"]), True)


def test_slots_of_experts_take_at_most_a_fifth_of_the_memory() -> None:
    shape = LoraShape(8, 16, (*ATTENTION_MODULES, *EXPERT_TARGETS))
    slot = 48 * 128 * 16 * 3 * (2048 + 768)  # bytes in int8
    assert 820e6 < slot < 835e6
    assert slots_within(141 * 10**9, shape, SPARSE, 1) == 8
    assert slots_within(16 * slot, shape, SPARSE, 1) == 3
    assert slots_within(16 * slot, shape, SPARSE, 2) == 1
    assert slots_within(GIB, shape, SPARSE, 1) == 1, "at least one"
    assert slots_within(GIB, replace(shape, targets=ATTENTION_MODULES), SPARSE, 1) == 8, "attention is small"
    dense = replace(SPARSE, dense_layers=tuple(range(24)))
    assert slots_within(16 * slot, shape, dense, 1) == 6, "dense layers have no experts"
