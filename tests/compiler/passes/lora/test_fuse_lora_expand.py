"""fuse_lora_expand: in prompt programs the linears add their LoRA deltas themselves."""

from collections import Counter
from typing import Any

import pytest
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes.lora import fuse_lora_expand
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.lora import LoraShape
from support.meta import compiled_without_weights
from support.three_tokens import PROMPTS_LORA, STEP_LORA, logits, relative

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
MANY = Bucket(300, 3, 12, 2, decode=False, lora=True)


def program(
    bucket: Bucket, fields: dict[str, Any] = FIELDS, targets: tuple[str, ...] | None = None, **options: Any
) -> Program:
    shape = LoraShape(2, 16) if targets is None else LoraShape(2, 16, targets)
    return compiled_without_weights(fields, shape if bucket.lora else None, CompileOptions(**options)).program(bucket)


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


def test_no_delta_is_written() -> None:
    fused, apart = ops(program(MANY)), ops(program(MANY, disable=("fuse_lora_expand",)))
    assert (
        fused["linear_8bit_lora"] == fused["lora_shrink"] == apart["lora_expand"] == 8
        and fused["lora_active"] == 1
        and not fused["lora_expand"]
    )
    assert fused["linear_8bit"] == apart["linear_8bit"] - 8
    some = ops(program(MANY, targets=("q_proj", "v_proj", "down_proj")))
    assert some["linear_8bit_lora"] == 4 and not some["lora_expand"]


def test_what_is_left_alone() -> None:
    few = program(Bucket(256, 3, 12, 2, decode=False, lora=True))
    assert ops(few)["lora_expand"] == 8 and "256 tokens: faster from 257 on" in few.passes
    for lowering in ("serial", "side_stream"):
        forced = program(MANY, lora_lowering=lowering)
        assert ops(forced)["lora_expand"] == 8 and f"lora_lowering is {lowering}" in forced.passes
    assert "the kernel supports only int8" in program(MANY, precision="fp8").passes
    odd = program(MANY, {**FIELDS, "intermediate_size": 320})
    assert ops(odd)["lora_expand"] == 2 and "packed linears of 320, 320 rows" in odd.passes
    assert not ops(program(STEP_LORA))["linear_8bit_lora"]
    assert not ops(program(Bucket(300, 3, 12, 2, decode=False, lora=False)))["linear_8bit_lora"]


def test_a_delta_in_a_plain_sum_stays() -> None:
    apart = program(MANY, disable=("fuse_silu_mul",), check_counts=False)
    assert ops(apart)["linear_8bit_lora"] == 6 and ops(apart)["lora_expand"] == 2
    assert "is a plain sum" in apart.passes


def test_it_computes_what_separate_launches_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_lora_expand, "FEWEST_TOKENS", 1)
    fused, apart = program(PROMPTS_LORA), program(PROMPTS_LORA, disable=("fuse_lora_expand",))
    assert ops(fused)["linear_8bit_lora"] == 8
    for adapters in ([1, -1, 0], [0, 0, 0]):
        got, want, without = logits(fused, adapters), logits(apart, adapters), logits(apart)
        assert 0 < relative(got, want) < 0.05 < 0.2 < relative(without, want)
