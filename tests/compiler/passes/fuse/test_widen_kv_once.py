"""widen_kv_once: in prompt programs attention reads keys and values that were made fp16 once."""

from collections import Counter
from typing import Any

import pytest
import torch
from sidestream.compiler.cost.bytes_and_flops import Assumptions, argument_bytes, named_arguments, step_bytes, work
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes.fuse import widen_kv_once
from sidestream.compiler.program.buffers import Buffer
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.lora import LoraShape
from support.meta import compiled_without_weights
from support.races import find_races
from support.three_tokens import PROMPTS_LORA, STEP_LORA, logits

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
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
MANY = Bucket(300, 3, 12, 5, decode=False, lora=False)
OFF = ("widen_kv_once",)


def program(bucket: Bucket = MANY, fields: dict[str, Any] = FIELDS, **options: Any) -> Program:
    lora = LoraShape(2, 16) if bucket.lora else None
    return compiled_without_weights(fields, lora, CompileOptions(**options)).program(bucket)


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


def wide_buffers(made: Program) -> list[Buffer]:
    """Keys and values in fp16; the residual stream is in fp16 too."""
    return [buffer for buffer in made.of_kind("temp") if buffer.dtype == torch.float16 and len(buffer.shape) == 5]


@pytest.mark.parametrize("lora", [True, False])
def test_one_plan_a_step_and_one_buffer_for_all_layers(lora: bool) -> None:
    bucket = Bucket(300, 3, 12, 5, decode=False, lora=lora)
    made, plain = program(bucket), program(bucket, disable=OFF)
    assert ops(made) == ops(plain) + Counter(widen_plan=1, widen_kv=3)
    wide = wide_buffers(made)
    assert len(wide) == 3 and {buffer.shape for buffer in wide} == {(3 * 3, 1, 2, 128, 128)} and find_races(made) == []
    assert (
        len({buffer.offset for buffer in wide}) == 1 and made.arena_bytes <= plain.arena_bytes + wide[0].nbytes + 8192
    )
    attention = [step for step in made.steps if step.op == "sidestream.paged_attention_quant"]
    assert [dict(named_arguments(step))["wide"].buffer for step in attention] == [buffer.name for buffer in wide]
    assert "widen_kv_once" in made.passes and Program.decoded(made.encoded()).passes == made.passes


def test_the_buffer_ends_at_65536_tokens() -> None:
    made = program(Bucket(8192, 256, 5000, 128, decode=False, lora=False))
    assert wide_buffers(made)[0].shape == (512, 1, 2, 128, 128)


def test_what_is_left_alone() -> None:
    few = program(Bucket(256, 3, 12, 5, decode=False, lora=False))
    assert not ops(few)["widen_kv"] and "256 tokens: faster from 257 on" in few.passes
    assert (
        "its cache is torch.float8_e4m3fn" in program(precision="fp8").passes
        and "its cache is torch.bfloat16" in program(precision="bf16").passes
    )
    narrow, three = {**FIELDS, "head_dim": 64}, {**FIELDS, "num_attention_heads": 3}
    assert (
        "2 heads of 64 on 1 KV heads" in program(fields=narrow).passes
        and "3 heads of 128 on 1 KV heads" in program(fields=three).passes
    )
    assert not ops(program(STEP_LORA))["widen_kv"] and not ops(program(disable=OFF))["widen_kv"]
    apart = program(disable=("fuse_quantize",))
    assert ops(apart)["widen_kv"] == ops(apart)["paged_attention"] == 3


def test_it_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widen_kv_once, "FEWEST_TOKENS", 1)
    made, plain = program(PROMPTS_LORA), program(PROMPTS_LORA, disable=OFF)
    assert ops(made)["widen_kv"] == 3 and not ops(plain)["widen_kv"]
    assert torch.equal(logits(made, [1, -1, 0]), logits(plain, [1, -1, 0]))


def test_what_moves() -> None:
    """The cache is read by widen_kv and no longer by attention, as far as there is room."""
    made, plain = program(), program(disable=OFF)
    assume = Assumptions(context=256)
    widen, attention, before = (
        next(step for step in each.steps if op in step.op)
        for each, op in ((made, "widen_kv"), (made, "paged_attention"), (plain, "paged_attention"))
    )
    cached = 3 * 256
    assert step_bytes(made, widen, assume) == cached * 2 * (128 + 4 + 256) + 9 * 2 * 4
    reads = {view.buffer: moved for view, moved in argument_bytes(made, attention, assume)}
    assert (
        sum(moved for name, moved in reads.items() if name.startswith("kv_")) == 0
        and reads["widen_kv"] == cached * 2 * 256
    )
    assert (
        step_bytes(made, attention, assume) - step_bytes(plain, before, assume) == cached * 2 * (256 - 132) + 3 * 4 * 4
    )
    assert work(made, attention, assume).flops == work(plain, before, assume).flops
    assert step_bytes(made, widen, Assumptions(context=128)) < step_bytes(made, widen, assume)
