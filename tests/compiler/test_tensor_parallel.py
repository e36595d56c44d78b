"""Two and four ranks over gloo compute what one does: logits of mixed adapters, and the greedy tokens that follow."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Program
from sidestream.compiler.run.collectives import check_same_order
from sidestream.ops.collectives.tensor_parallel_group import (
    GroupError,
    RankGroup,
    register_group,
    tensor_parallel_group,
)
from support.compiled import CompiledRunner
from support.ia3 import EVERYWHERE, ia3_adapters
from support.paged import Chunk, plain_model
from support.ranks import run_on_ranks
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_model
from torch import distributed
from torch.nn.functional import kl_div, log_softmax

RANKS, STEPS = 4, 4
LENGTHS = (1, 5, 30, 70, 12, 20)
ODD = {"vocab_size": 323}  # which no number of ranks divides
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fewer KV heads than ranks, heads of 80": (
        "Llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 80},
    ),
    "biases, an odd vocabulary": ("Qwen2", {**ODD, "num_attention_heads": 8, "intermediate_size": 192}),
    "normed heads": ("Qwen3", {"num_key_value_heads": 4}),
}
ADAPTERS = [
    AdapterSpec(rank=7),
    AdapterSpec(rank=16, targets=("q_proj", "v_proj", "down_proj"), use_rslora=True),
    AdapterSpec(rank=4, extra={"use_dora": True, "bias": "all"}),
    AdapterSpec(rank=4, targets=("v_proj", "o_proj", "down_proj"), extra={"lora_bias": True}),
]


def run(base: Path, adapters: list[str], world: int, rank: int, precision: str) -> tuple[torch.Tensor, Program]:
    """Logits [steps, sequences, V] of prompts and greedy steps, with and without adapters in a batch; and a program."""
    dice = random.Random(1)
    model, _ = plain_model(TinyBase(base), adapters, torch.float32 if precision == "fp32" else torch.bfloat16)
    options = CompileOptions(precision=precision, tensor_parallel=world, tensor_parallel_rank=rank)  # type: ignore[arg-type]
    torch.manual_seed(1)  # which pages sequences get
    runner = CompiledRunner(model, options, len(LENGTHS))
    tokens = [[dice.randrange(320) for _ in range(length)] for length in LENGTHS]
    slots = [0, 1, 4, -1, 2, 3]
    steps = []
    for _ in range(STEPS):
        chunks = [Chunk(index, some, slots[index]) for index, some in enumerate(tokens)]
        steps.append(torch.stack([logits[-1] for logits in runner.step(chunks)]))
        tokens = [[token] for token in steps[-1].argmax(-1).tolist()]
    return torch.stack(steps), next(iter(runner.compiled._by_shape.values()))


def refuses_other_collectives(program: Program, group: RankGroup) -> bool:
    """Whether all ranks are told when the last one has a program with fewer of them."""
    check_same_order(program, group)
    last = next(step for step in reversed(program.steps) if "all_" in step.op)
    fewer = replace(program, steps=tuple(step for step in program.steps if step is not last))
    try:
        check_same_order(fewer if group.rank == group.world - 1 else program, group)
    except GroupError as error:
        return "has other collectives on rank 3 than on rank 0" in str(error)
    return False


def on_ranks(group: RankGroup, cases: list[tuple[Path, list[str]]]) -> list[dict[str, torch.Tensor]]:
    pair = distributed.new_group([0, 1])
    results: list[dict[str, torch.Tensor]] = []
    for base, adapters in cases:
        logits, program = run(base, adapters, 4, group.rank, "fp32")
        found = {"4": logits, "refused": torch.tensor(refuses_other_collectives(program, group))}
        if group.rank < 2:
            register_group(RankGroup(tensor_parallel_group(2), group.rank, 2, pair))
            found["2"], _ = run(base, adapters, 2, group.rank, "fp32")
            if not results:
                found["int8"], _ = run(base, adapters, 2, group.rank, "int8")
        results.append(found)
    return results


@pytest.mark.first
def test_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    cases = []
    for name, (family, fields) in CASES.items():
        base = tiny_model(tmp_path / name, family, num_hidden_layers=1, **fields)
        adapters = [*tiny_adapters(base, ADAPTERS), *ia3_adapters(base, [EVERYWHERE])]
        cases.append((base.path, [str(path) for path in adapters]))
    (tmp_path / "ranks").mkdir()
    ranks = run_on_ranks(RANKS, on_ranks, tmp_path / "ranks", cases)
    exact = []
    for case, (base, adapters) in enumerate(cases):
        want, _ = run(base, adapters, 1, 0, "fp32")
        exact.append(want)
        for found in ranks:
            assert found[case]["refused"]
            for world in ("2", "4") if "2" in found[case] else ("4",):
                logits = found[case][world]
                torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)
                assert torch.equal(logits.argmax(-1), want.argmax(-1))
                assert torch.equal(logits, ranks[0][case][world]), "ranks hold the same bits"
    eight, other = (found[0]["int8"] for found in ranks[:2])
    assert torch.equal(eight, other)
    prompts = [log_softmax(logits[0], -1) for logits in (eight, exact[0])]
    assert kl_div(*prompts, log_target=True, reduction="batchmean") < 2e-2
