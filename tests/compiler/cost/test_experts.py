"""Bytes and FLOPs of experts: as many as a step's tokens choose at random."""

import pytest
import torch
from sidestream.compiler.api import CompiledModel, compile_model
from sidestream.compiler.cost.bytes_and_flops import Assumptions, argument_bytes, work
from sidestream.compiler.program.program import Bucket, Program
from support.sparse import sparse_model

EXPERTS, TOP_K, HIDDEN, WIDTH, RANK = 32, 4, 128, 64, 32
MATRIX = 2 * WIDTH * HIDDEN  # bytes of an expert's gate and up


@pytest.fixture(scope="module")
def compiled() -> CompiledModel:
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    return compile_model(sparse_model("qwen3", True, torch.bfloat16, "meta", **sizes))


def decode(compiled: CompiledModel, sequences: int, lora: bool = False) -> Program:
    return compiled.program(Bucket(sequences, sequences, 2 * sequences + 1, 2, decode=True, lora=lora))


def read(program: Program, buffer: str, assume: Assumptions = Assumptions()) -> int:  # noqa: B008
    """Bytes of a buffer that the program's steps read."""
    found = (pair for step in program.steps for pair in argument_bytes(program, step, assume))
    return sum(moved for view, moved in found if view.buffer.endswith(buffer))


def different(groups: int, tokens: int, seed: int = 0) -> float:
    """The mean number of experts that `tokens` tokens choose, in each of `groups` groups, from random choices."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.rand(2000, tokens, EXPERTS, generator=generator).topk(TOP_K).indices.flatten(1)
    counts = [len(set(each)) for each in choices.tolist()]
    return groups * sum(counts) / len(counts)


@pytest.mark.parametrize("tokens", [1, 8, 24])
def test_weights_of_the_chosen_experts_are_read(compiled: CompiledModel, tokens: int) -> None:
    program = decode(compiled, tokens)
    assert read(program, "experts_gate_up_proj_weight_int8") == pytest.approx(different(1, tokens) * MATRIX, rel=0.02)
    same = Assumptions(routing="same")
    assert read(program, "experts_gate_up_proj_weight_int8", same) == TOP_K * MATRIX
    (step,) = (step for step in program.steps if step.op == "sidestream.grouped_linear_8bit_silu_mul")
    assert work(program, step).flops == {1: 2.0 * tokens * TOP_K * MATRIX}


@pytest.mark.parametrize(("tokens", "adapters"), [(3, 1), (24, 3)])
def test_stacks_of_each_adapters_experts_are_read(compiled: CompiledModel, tokens: int, adapters: int) -> None:
    program = decode(compiled, tokens, lora=True)
    stack = read(program, "experts_gate_up_proj_lora_b_int8", Assumptions(adapters=adapters))
    assert stack == pytest.approx(different(adapters, tokens // adapters) * 2 * WIDTH * RANK, rel=0.02)
