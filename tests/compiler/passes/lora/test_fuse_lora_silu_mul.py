"""fuse_lora_silu_mul: in decode programs of many sequences SiLU * mul makes the LoRA delta of gate and up itself."""

import operator
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from sidestream.compiler.cost.bytes_and_flops import Assumptions, work
from sidestream.compiler.cost.estimate import estimate, floor_seconds, total_seconds
from sidestream.compiler.graph.nodes import is_call
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes.base import Context
from sidestream.compiler.passes.lora import fuse_lora_silu_mul
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.lora import LoraShape
from sidestream.ops.elementwise.silu_mul import silu_mul_quant
from sidestream.ops.lora.expand import lora_expand
from sidestream.ops.lora.expand_rounded import lora_round
from sidestream.ops.lora.plan import lora_plan
from sidestream.ops.lora.silu_mul_lora import silu_mul_lora
from support.fx_graphs import GraphBuilder
from support.meta import compiled_without_weights
from support.three_tokens import STEP_LORA, logits, relative

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PASS = "fuse_lora_silu_mul"


def step(sequences: int, lora: bool = True) -> Bucket:
    return Bucket(sequences, sequences, 4 * sequences, 2, decode=True, lora=lora)


@cache
def compiled(lora: bool, rank: int = 16, targets: tuple[str, ...] | None = None, **options: Any) -> Any:
    shape = LoraShape(2, rank) if targets is None else LoraShape(2, rank, targets)
    return compiled_without_weights(FIELDS, shape if lora else None, CompileOptions(**options))


def program(bucket: Bucket, **options: Any) -> Program:
    return compiled(bucket.lora, **options).program(bucket)


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


@pytest.mark.parametrize("sequences", [33, 256])
def test_no_delta_of_gate_and_up_is_written(sequences: int) -> None:
    fused, apart = ops(program(step(sequences))), ops(program(step(sequences), disable=(PASS,)))
    assert (
        fused["silu_mul_lora"] == apart["silu_mul_quant"] == 2
        and not fused["silu_mul_quant"]
        and not apart["silu_mul_lora"]
    )
    assert (
        fused["quantize_rowwise"] == apart["quantize_rowwise"] + 2 and fused["lora_shrink"] == apart["lora_shrink"] == 8
    )
    expands = [made["lora_expand"] + made["lora_expand_rounded"] for made in (fused, apart)]
    assert expands == [6, 8] and [made["lora_round"] for made in (fused, apart)] == (
        [2, 0] if sequences == 33 else [8, 8]
    )
    assert ops(program(step(sequences), targets=("gate_proj",)))["silu_mul_lora"] == 2  # packed with an up of zeros


@pytest.mark.parametrize("share", [None, 0.2])
def test_it_waits_for_the_rounded_ranks_and_follows_the_projection(share: float | None) -> None:
    made = program(step(100), lora_sm_share=share)
    for index, each in enumerate(made.steps):
        if each.op != "sidestream.silu_mul_lora":
            continue
        main, side = ([other for other in made.steps[:index] if other.stream == stream] for stream in ("main", "side"))
        rounded = next(other for other in made.steps if other.outs and other.outs[0] == each.args[1])
        assert (
            rounded.op == "sidestream.lora_round" and rounded.outs[1] == each.args[2] and each.waits == (rounded.index,)
        )
        shrink = side[side.index(rounded) - 1]
        assert shrink.op == "sidestream.lora_shrink" and shrink.outs[0] == rounded.args[0]
        assert rounded.stream == "side" and rounded.pdl and not rounded.waits and rounded.sm_budget == shrink.sm_budget
        assert (
            each.stream == "main"
            and each.pdl
            and main[-1].op == "sidestream.linear_8bit"
            and main[-1].outs[0] == each.args[0]
        )
        quantized = next(other for other in made.steps[index + 1 :] if other.stream == "main")
        assert quantized.op == "sidestream.quantize_rowwise" and quantized.pdl and not quantized.waits


def test_what_is_left_alone() -> None:
    for sequences in (fuse_lora_silu_mul.FEWEST_TOKENS - 1, fuse_lora_silu_mul.MOST_TOKENS + 1):
        other = program(step(sequences))
        assert (
            not ops(other)["silu_mul_lora"]
            and f"{PASS}: silu_mul_quant: {sequences} tokens: faster from 33 to 256" in other.passes
        )
    for lowering in ("serial", "side_stream"):
        forced = program(step(65), lora_lowering=lowering)
        assert (
            not ops(forced)["silu_mul_lora"] and f"{PASS}: silu_mul_quant: lora_lowering is {lowering}" in forced.passes
        )
    assert "its adapters are torch.bfloat16" in program(step(65), lora_dtype="bf16").passes
    assert "its adapters are torch.float8_e4m3fn" in program(step(65), precision="fp8", lora_dtype="fp8").passes
    large = program(step(65), rank=128)
    assert (
        not ops(large)["silu_mul_lora"]
        and "LoRA stacks of rank 128; supported are multiples of 8 up to 64" in large.passes
    )
    assert not ops(program(step(65), targets=("q_proj", "v_proj", "down_proj")))["silu_mul_lora"]
    assert not ops(program(step(65, lora=False)))["silu_mul_lora"]
    assert not ops(program(Bucket(100, 3, 12, 2, decode=False, lora=True)))["silu_mul_lora"]


@pytest.mark.parametrize(
    ("slices", "readers", "reason"),
    [
        ([64, 64], 1, None),
        ([64, 64], 2, "more than one op reads"),
        ([96, 32], 1, r"a delta \(100, 128\) of 96, 32 columns for \(100, 128\) is not that of gate and up"),
    ],
)
def test_one_delta_of_two_halves(slices: list[int], readers: int, reason: str | None) -> None:
    build = GraphBuilder(dynamic=False)
    index, gate_up = (
        build.input("adapter_index", (100,), torch.int32),
        build.input("gate_up", (100, 128), torch.bfloat16),
    )
    planes, b = build.input("planes", (2, 100, 32)), build.weight("b", (3, 128, 16), torch.int8, "adapter")
    plan = build.call(lora_plan, index, 3, 16)
    order, tiles = build.call(operator.getitem, plan, 0), build.call(operator.getitem, plan, 1)
    delta = build.call(
        lora_expand, planes, b, order, tiles, 16, slices, build.weight("b_scale", (3, 128), kind="adapter")
    )
    made = build.finish(
        *(
            build.call(operator.getitem, build.call(silu_mul_quant, gate_up, delta, False, torch.int8, 128), 1)
            for _ in range(readers)
        )
    )
    next(node for node in made.graph.nodes if is_call(node, lora_expand)).meta.update(stream="side", sm_share=0.25)
    report = fuse_lora_silu_mul.fuse_lora_silu_mul(made.graph, Context(CompileOptions()))
    made.graph.lint()
    assert report.matches == (reason is None) and len(report.rejected) == (readers if reason else 0)
    assert all(re.search(str(reason), refused) for refused in report.rejected)
    for node in made.graph.nodes:
        if is_call(node, lora_round, silu_mul_lora):
            side = is_call(node, lora_round)
            assert (node.meta.get("stream"), node.meta.get("sm_share")) == (("side", 0.25) if side else (None, None))


def test_it_computes_what_separate_launches_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_lora_silu_mul, "FEWEST_TOKENS", 1)
    for options in ({}, {"lora_input": "bf16"}):  # then h has a second reader
        fused, apart = program(STEP_LORA, **options), program(STEP_LORA, disable=(PASS,), **options)
        assert ops(fused)["silu_mul_lora"] == 2
        for adapters in ([1, -1, 0], [0, 0, 0]):
            got, want, without = logits(fused, adapters), logits(apart, adapters), logits(apart)
            assert 0 < relative(got, want) < 0.05 < 0.2 < relative(without, want)


def test_its_cost() -> None:
    """Of the adapters' rows those of the active ones count, their products as int8."""
    made = program(step(128), rank=32)
    fused = next(each for each in made.steps if each.op == "sidestream.silu_mul_lora")
    one, two = (work(made, fused, Assumptions(adapters=adapters)) for adapters in (1, 2))
    assert two.bytes - one.bytes == 1024 * (32 + 4) and one.flops == two.flops == {1: 2.0 * 128 * 1024 * 32}
    plan = 4 * 128 + 12 * (128 // 16 + 3)  # the order of the tokens and their tiles
    assert one.bytes == 128 * (1024 * 2 + 512 * 2) + 1024 * 36 + 128 * (2 * 32 + 2 * 4) + plan
    assert floor_seconds(made) < total_seconds(estimate(made))
