"""Parts of sums over the ranks lie where the peers read them, and nobody writes there while a peer reads."""

import pytest
import sidestream
import torch
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Bucket, Program
from sidestream.compiler.run.bound_program import BoundProgram
from sidestream.compiler.run.collectives import places_of
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from sidestream.ops.collectives.exchange import Exchange, exchange_bytes
from support.exchanges import register_rank
from support.meta import FIELDS
from support.races import find_peer_races, find_races

LAYERS = 2


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    fields = {**FIELDS, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    model = Llama(LlamaConfig.from_dict(fields), LoraShape(3, 16), torch.bfloat16, "meta")
    compiled = sidestream.compile(model, CompileOptions(tensor_parallel=2))
    buckets = {
        "decode": Bucket(4, 4, 8, 2, decode=True, lora=False),
        "lora": Bucket(4, 4, 8, 2, decode=True),
        "prompt": Bucket(32, 4, 8, 2, lora=False),
    }
    return {name: compiled.program(bucket) for name, bucket in buckets.items()}


def test_every_linear_before_a_sum_writes_where_the_peers_read(programs: dict[str, Program]) -> None:
    for name in ("decode", "prompt"):
        places = places_of(programs[name])
        assert list(places.values()) == [0, 1] * LAYERS
        makers = [step.op for step in programs[name].steps if step.outs and step.outs[0].buffer in places]
        assert makers == ["sidestream.linear_8bit"] * 2 * LAYERS
    # a delta joins them first; in a prompt program's last sum it has joined before
    assert places_of(programs["lora"]) == {}


def test_nobody_writes_what_a_peer_may_read(programs: dict[str, Program]) -> None:
    for program in programs.values():
        assert find_peer_races(program, places_of(program)) == [] and find_races(program) == []
    program, places = programs["decode"], places_of(programs["decode"])
    names = list(places)
    assert find_peer_races(program, dict.fromkeys(names, 0)), "consecutive sums need different places"
    over_the_end = find_peer_races(program, {**places, names[-1]: 2, names[0]: 2})
    assert over_the_end and all("of run 0" in each and "in run 1" in each for each in over_the_end)


def test_an_odd_number_of_sums_does_not_end_where_it_began(programs: dict[str, Program]) -> None:
    whole = programs["decode"]
    sums = [step.index for step in whole.steps if step.op.startswith("sidestream.all_reduce")]
    steps = whole.steps[: sums[2] + 1]
    odd = Program(whole.bucket, whole.buffers, steps, whole.arena_bytes, (), whole.recipes)
    assert list(places_of(odd).values()) == [0, 1, 2] and find_peer_races(odd, places_of(odd)) == []


def test_a_bound_program_has_them_in_shared_memory(programs: dict[str, Program]) -> None:
    program = programs["decode"]
    memory = torch.zeros(exchange_bytes(2, 4096), dtype=torch.uint8)
    exchange = Exchange(0, (memory, memory), 4096)
    group = register_rank(exchange)
    given = {
        buffer.name: torch.zeros(buffer.shape, dtype=buffer.dtype)
        for buffer in program.of_kind("input", "weight", "adapter")
    }
    bound = BoundProgram(program, given)
    names = [step.outs[0].buffer for step in program.steps if step.outs]
    shared = {name: exchange.offset_of(outs[0]) for name, outs in zip(names, filter(None, bound.outs), strict=True)}
    assert {name for name, offset in shared.items() if offset is not None} == set(places_of(program))
    group.buffers.clear()
    assert all(exchange.offset_of(outs[0]) is None for outs in BoundProgram(program, given).outs if outs)
