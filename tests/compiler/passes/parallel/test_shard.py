"""`shard`: what it cuts and refuses, and that every rank's program has the same collectives in one order."""

from dataclasses import replace
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.api import CompiledModel
from sidestream.compiler.graph.materialize import materialize
from sidestream.compiler.graph.recipe import Share, SliceError, hadamard, param, sliced
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.compiler.program.buffers import ProgramError
from sidestream.compiler.program.program import Bucket, Program
from sidestream.compiler.run.collectives import collective_order
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from support.meta import FIELDS

LAYERS = 2
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}


def compiled(rank: int = 0, world: int = 2, options: dict[str, Any] | None = None, **fields: Any) -> CompiledModel:
    model = Llama(LlamaConfig.from_dict({**FIELDS, **FOUR_HEADS, **fields}), LoraShape(3, 16), torch.bfloat16, "meta")
    chosen = CompileOptions(tensor_parallel=world, tensor_parallel_rank=rank, **(options or {}))
    return sidestream.compile(model, chosen, text=False)


def collectives(program: Program) -> list[tuple[Any, ...]]:
    found = [step for step in program.steps if "all_" in step.op]
    return [(step.op, step.args[1:], *((view.shape, view.dtype) for view in step.outs)) for step in found]


def test_two_collectives_a_layer_and_one_for_the_logits_in_one_order_on_all_ranks() -> None:
    ranks = [compiled(rank) for rank in range(2)]
    record = next(each for each in ranks[0].records if each.name == "shard")
    assert record.matches == 2 * LAYERS + 1 and record.rejected == []
    for bucket in (Bucket(4, 4, 8, 2, decode=True), Bucket(32, 4, 8, 2, decode=False)):
        one, other = (rank.program(bucket) for rank in ranks)
        assert collectives(one) == collectives(other) and len(collectives(one)) == 2 * LAYERS + 1
        assert len(collective_order(one)) == 2 * LAYERS + 1
        assert [step.op for step in one.steps] == [step.op for step in other.steps]
        assert one.recipes != other.recipes


def test_a_collective_on_the_side_lane_has_no_place_in_the_order() -> None:
    program = compiled().program(Bucket(4, 4, 8, 2, decode=True))
    aside = tuple(replace(step, stream="side", waits=()) for step in program.steps)
    with pytest.raises(ProgramError, match="is a collective on the side lane"):
        collective_order(replace(program, steps=aside))


def test_a_rank_reads_its_share_of_the_checkpoint_only() -> None:
    whole, half = compiled(world=1), compiled(rank=1)
    stored = {name: torch.randn(shape) for name, shape in whole._module.checkpoint_tensors().items()}  # type: ignore[union-attr]
    read: dict[str, int] = {}

    def bring(name: str, part: torch.Tensor) -> torch.Tensor:
        read[name] = part.numel()
        return part

    for recipe in half.recipes.values():
        if recipe.sources() <= stored.keys():
            materialize(recipe, stored.__getitem__, None, bring)
    shared = {name for name in stored if "_proj" in name or name == "lm_head.weight"}
    assert {name for name in read if read[name] * 2 == stored[name].numel()} == shared
    assert all(read[name] == stored[name].numel() for name in read.keys() - shared)


def test_switched_off_by_name_it_leaves_the_model_whole() -> None:
    programs = [
        compiled(world=world, options={"disable": disable}).program(Bucket(4, 4, 8, 2, decode=True))
        for world, disable in ((1, ()), (2, ("shard",)))
    ]
    assert programs[0].steps == programs[1].steps


@pytest.mark.parametrize(
    ("world", "fields", "options", "message"),
    [
        (8, {}, {}, "tensor_parallel=8 does not divide the model's 4 attention heads; choose 1 or 2 or 4"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3}, {}, "the model's 3 KV heads; choose 1$"),
        (2, {"intermediate_size": 193}, {"precision": "bf16"}, "193 columns of the MLP .*; choose 1$"),
        (4, {"intermediate_size": 96}, {}, "24 columns of the MLP .* multiple of 16; choose a smaller"),
        (3, {}, {}, "tensor_parallel=3 must be one of"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    world: int, fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        compiled(world=world, options=options, **fields)


def test_blocks_that_are_rotated_together_are_not_cut_apart() -> None:
    rotated = hadamard(param("w"), 1, 64)
    weight = torch.randn(4, 256)
    parts = [materialize(sliced(rotated, 1, Share(rank, 4), 256), {"w": weight}.__getitem__) for rank in range(4)]
    torch.testing.assert_close(torch.cat(parts, 1), materialize(rotated, {"w": weight}.__getitem__))
    with pytest.raises(SliceError, match="blocks of 64 channels"):
        sliced(rotated, 1, Share(0, 8), 256)
