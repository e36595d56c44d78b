"""fuse_lora_silu_mul: gate_up, its LoRA branch and SiLU * mul of a decode step as one launch."""
from collections import Counter
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes import fuse_lora_silu_mul
from sidestream.compiler.program import Bucket, Program
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from support.three_tokens import STEP_LORA, logits, relative

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def program(bucket: Bucket, **options: Any) -> Program:
    module = Llama(LlamaConfig.from_dict(FIELDS), LoraShape(2, 16) if bucket.lora else None, torch.bfloat16, "meta")
    return sidestream.compile(module, CompileOptions(**{"whole_layer": "off", "lora_lowering": "one_launch", **options})).program(bucket)


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


@pytest.fixture
def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_lora_silu_mul, "fits", lambda *sizes: None)


def test_one_launch_for_the_branch(takes_all: None) -> None:
    fused, apart = ops(program(STEP_LORA)), ops(program(STEP_LORA, disable=("fuse_lora_silu_mul",)))
    assert fused["linear_8bit_lora_silu_mul"] == 2 and fused["lora_active"] == 1 and not fused["silu_mul_quant"]
    assert apart["silu_mul_quant"] == 2 and not apart["linear_8bit_lora_silu_mul"]
    saved = {name: apart[name] - fused[name] for name in ("linear_8bit", "lora_shrink", "lora_expand")}
    assert saved == dict.fromkeys(saved, 2)


def test_what_is_left_alone(takes_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ops(program(Bucket(5, 5, 5, 1, decode=True, lora=False)))["linear_8bit_lora_silu_mul"]
    assert not ops(program(Bucket(5, 1, 5, 1, decode=False, lora=True)))["linear_8bit_lora_silu_mul"]
    assert "lora_lowering is auto" in program(STEP_LORA, lora_lowering="auto").passes
    other_rows = program(STEP_LORA, lora_input="bf16")
    assert not ops(other_rows)["linear_8bit_lora_silu_mul"] and "LoRA reads other rows than the projection" in other_rows.passes
    e4m3 = program(STEP_LORA, precision="fp8", lora_dtype="fp8")
    assert not ops(e4m3)["linear_8bit_lora_silu_mul"] and "the launch takes int8" in e4m3.passes
    monkeypatch.setattr(fuse_lora_silu_mul, "fits", lambda *sizes: "too odd a size")
    assert "too odd a size" in program(STEP_LORA).passes and ops(program(STEP_LORA))["lora_expand"] == ops(other_rows)["lora_expand"]


def test_it_computes_what_separate_launches_compute(takes_all: None) -> None:
    fused, apart = program(STEP_LORA), program(STEP_LORA, disable=("fuse_lora_silu_mul",))
    for adapters in ([1, -1, 0], [0, 0, 0]):
        got, want, without = logits(fused, adapters), logits(apart, adapters), logits(apart)
        assert 0 < relative(got, want) < 0.08 < 0.2 < relative(without, want)
