"""round_lora_ranks: where it gains, LoRA's ranks are added up and rounded once."""

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
from sidestream.compiler.cost.bytes_and_flops import Assumptions, work
from sidestream.compiler.cost.estimate import estimate, floor_seconds, total_seconds
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes.lora import round_lora_ranks
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.lora import LoraShape
from support.meta import compiled_without_weights
from support.three_tokens import STEP_LORA, logits, relative

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PASS = "round_lora_ranks"


@cache
def compiled(rank: int = 16, small: bool = False, **options: Any) -> Any:
    fields = FIELDS | (
        {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1}
        if small
        else {}
    )
    return compiled_without_weights(fields, LoraShape(2, rank), CompileOptions(**options))


def program(sequences: int, lora: bool = True, **options: Any) -> Program:
    return compiled(**options).program(Bucket(sequences, sequences, 4 * sequences, 2, decode=True, lora=lora))


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


def test_branches_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tokens the wide ones, here gate/up and down; then none; then all."""
    monkeypatch.setattr(round_lora_ranks, "WIDE", 1536)
    # from 33 on SiLU * mul takes those of gate and up
    for sequences, rounded in ((7, 0), (8, 4), (32, 4), (33, 0), (64, 0), (65, 6), (256, 6), (257, 0)):
        made = ops(program(sequences))
        taken = 2 if 33 <= sequences <= 256 else 0
        assert (made["lora_expand_rounded"], made["lora_expand"]) == (rounded, 8 - taken - rounded), sequences
        assert made["lora_round"] == rounded + taken


def test_it_follows_the_shrink_in_its_lane() -> None:
    made = program(100, lora_sm_share=0.2)
    for step in made.steps:
        if step.op != "sidestream.lora_expand_rounded":
            continue
        side = [other for other in made.steps[: step.index] if other.stream == "side"]
        shrink, rounded = side[-2:]
        assert (shrink.op, rounded.op, step.stream) == ("sidestream.lora_shrink", "sidestream.lora_round", "side")
        assert rounded.args[0] == shrink.outs[0] and step.args[:2] == rounded.outs
        assert rounded.pdl and step.pdl and not rounded.waits and not step.waits
        assert shrink.sm_budget == rounded.sm_budget == step.sm_budget == round(0.2 * 132)


@pytest.mark.parametrize(("sequences", "planes"), [(100, [2, 2, 2, 4]), (200, [1, 2, 1, 4])])
def test_planes_are_as_many_as_are_best_then(sequences: int, planes: list[int]) -> None:
    """q/k/v, o, gate and up, down. In separate expands each block of columns would read all of them."""
    for options, want in (({}, planes), ({"disable": (PASS, "fuse_lora_silu_mul")}, [1, 1, 1, 2])):
        shrinks = [
            step.outs[0].shape[0] for step in program(sequences, **options).steps if step.op == "sidestream.lora_shrink"
        ]
        assert shrinks == want * 2


def test_what_is_left_alone() -> None:
    def refusals(made: Program) -> set[str]:
        told = [line for line in made.passes.splitlines() if line.strip().startswith(f"{PASS}: ")]
        return {line.split(": ", 2)[2].partition("  x ")[0] for line in told}

    for lowering in ("serial", "side_stream"):
        assert not ops(program(65, lora_lowering=lowering))["lora_round"] and refusals(
            program(65, lora_lowering=lowering)
        ) == {f"lora_lowering is {lowering}"}
    assert refusals(program(65, lora_dtype="bf16")) == {
        "its adapters are torch.bfloat16; the kernel supports only torch.int8"
    }
    assert refusals(program(65, rank=128)) == {"LoRA stacks of rank 128; supported are multiples of 8 up to 64"}
    [reason] = {re.sub("[0-9]+ to [0-9]+ features", "K to N features", refusal) for refusal in refusals(program(40))}
    assert (
        reason == "40 tokens, K to N features: faster from 65 to 256, branches of more than 8192 features from 8 "
        "to 32 too"
    )
    assert not ops(program(65, lora=False))["lora_round"]
    assert not ops(compiled().program(Bucket(100, 3, 12, 2, decode=False, lora=True)))["lora_round"]


def test_it_computes_what_planes_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_lora_ranks, "WIDE", 0)
    monkeypatch.setattr(round_lora_ranks, "WIDE_TOKENS", (1, 32))
    fused, apart = (compiled(small=True, disable=disable).program(STEP_LORA) for disable in ((), (PASS,)))
    assert ops(fused)["lora_expand_rounded"] == ops(apart)["lora_expand"] == 8
    for adapters in ([1, -1, 0], [0, 0, 0]):
        got, want, without = logits(fused, adapters), logits(apart, adapters), logits(apart)
        assert 0 < relative(got, want) < 0.05 < 0.2 < relative(without, want)


def test_its_cost() -> None:
    """Of the adapters' rows those of the active ones count, their products as int8."""
    made = program(128, rank=32)
    step = next(each for each in made.steps if each.op == "sidestream.lora_expand_rounded")
    one, two = (work(made, step, Assumptions(adapters=adapters)) for adapters in (1, 2))
    width = step.outs[0].shape[1]
    assert two.bytes - one.bytes == width * (32 + 4) and one.flops == two.flops == {1: 2.0 * 128 * width * 32}
    assert floor_seconds(made) < total_seconds(estimate(made))
