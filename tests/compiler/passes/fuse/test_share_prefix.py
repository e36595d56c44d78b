"""share_prefix: programs of buckets with `cascade` attend to shared pages in a launch of their own."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Bucket, Program, ProgramError
from sidestream.graphs.lora import LoraShape
from support.meta import compiled_without_weights
from support.three_tokens import STEP, STEP_LORA, logits

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def program(bucket: Bucket, fields: dict[str, Any] = FIELDS, **options: Any) -> Program:
    lora = LoraShape(2, 16) if bucket.lora else None
    return compiled_without_weights(fields, lora, CompileOptions(**options)).program(bucket)


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


def decode(sequences: int, lora: bool = False, cascade: bool = True) -> Bucket:
    return Bucket(sequences, sequences, 64, 4, decode=True, lora=lora, cascade=cascade)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize(("sequences", "lora"), [(16, False), (20, True), (64, True)])
def test_where_it_applies(precision: str, sequences: int, lora: bool) -> None:
    """With each form of attention; the plan is complete before the kernels before attention, which reads it early."""
    made = program(decode(sequences, lora), precision=precision)
    assert ops(made)["prefix_attention"] == 2 and ops(made)["prefix_plan"] == 1
    names = [step.op.removeprefix("sidestream.") for step in made.steps]
    plan = names.index("prefix_plan")
    assert plan < 2 and names.index("prefix_attention") > 4
    launches = [step.pdl for step in made.steps[plan + 1 :] if step.stream == "main"]
    assert not launches[0] and all(launches[1:]), "only the next kernel waits until the plan is written"
    plain = program(decode(sequences, lora, cascade=False), precision=precision)
    assert not ops(plain)["prefix_attention"] and "share_prefix" not in plain.passes
    assert ops(made) - ops(plain) == Counter(prefix_attention=2, prefix_plan=1)
    assert plain.name + "_cascade" == made.name


def test_what_is_left_alone() -> None:
    def refused(bucket: Bucket, reason: str, fields: dict[str, Any] = FIELDS, **options: Any) -> None:
        made = program(bucket, fields, **options)
        assert not ops(made)["prefix_attention"] and not ops(made)["prefix_plan"]
        assert reason in made.passes

    refused(decode(16), "no kernel supports 8 heads of 64", {**FIELDS, "num_attention_heads": 8, "head_dim": 64})
    refused(decode(16), "over torch.bfloat16", precision="bf16")
    window = {"sliding_window": 128, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    refused(decode(16), "its window has 128 tokens", {**FIELDS, **window})
    with pytest.raises(ProgramError, match="cascade=True must have decode=True"):
        Bucket(64, 16, 64, 4, False, False, 4, cascade=True)


@pytest.mark.parametrize("bucket", [STEP, STEP_LORA], ids=["base", "adapters"])
def test_it_computes_the_same(bucket: Bucket) -> None:
    shared, plain = program(replace(bucket, cascade=True)), program(bucket)
    assert ops(shared)["prefix_attention"] == 2
    assert torch.equal(logits(shared, [1, -1, 0]), logits(plain, [1, -1, 0]))
