"""quantize_in_blocks: some decode steps quantize attention's output and SiLU * mul by 128 columns, in the launch
that computes them.
"""

from collections import Counter
from typing import Any

import pytest
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes.fuse import quantize_in_blocks
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.lora import LoraShape
from support.meta import compiled_without_weights
from support.three_tokens import STEP, STEP_LORA, logits, relative

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def program(bucket: Bucket, fields: dict[str, Any] = FIELDS, **options: Any) -> Program:
    lora = LoraShape(2, 16) if bucket.lora else None
    return compiled_without_weights(fields, lora, CompileOptions(whole_layer="off", **options)).program(bucket)


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("lora", [False, True])
def test_where_it_applies(precision: str, lora: bool) -> None:
    options = {"precision": precision, "lora_dtype": "auto" if precision == "int8" else "fp8"}
    found = ops(program(Bucket(20, 20, 4, 1, decode=True, lora=lora), **options))
    assert (
        found["paged_attention_blocks"] == found["silu_mul_blocks"] == 2
        and not found["paged_attention_quant"]
        and not found["silu_mul_quant"]
    )
    apart = ops(program(Bucket(20, 20, 4, 1, decode=True, lora=lora), disable=("quantize_in_blocks",), **options))
    assert apart["paged_attention_quant"] == apart["silu_mul_quant"] == 2 and sum(apart.values()) == sum(found.values())
    assert not ops(program(Bucket(20, 1, 4, 1, decode=False, lora=lora), **options))["silu_mul_blocks"]  # a prompt


def test_what_is_left_alone() -> None:
    for tokens in (quantize_in_blocks.FEWEST_TOKENS - 1, quantize_in_blocks.MOST_TOKENS + 1):
        other = program(Bucket(tokens, tokens, 4, 1, decode=True, lora=False))
        assert not ops(other)["silu_mul_blocks"] and f"{tokens} tokens: one scale per row is as fast" in other.passes
    odd = program(Bucket(20, 20, 4, 1, decode=True, lora=False), {**FIELDS, "intermediate_size": 192})
    assert (
        ops(odd)["silu_mul_quant"] == 2
        and ops(odd)["paged_attention_blocks"] == 2
        and "rows of 192 are not whole blocks of 128" in odd.passes
    )
    wide = program(Bucket(20, 20, 4, 1, decode=True, lora=True), lora_input="bf16")  # LoRA reads the 16-bit rows too
    assert ops(wide)["silu_mul_quant"] == ops(wide)["paged_attention_quant"] == 2


@pytest.mark.parametrize("bucket", [STEP, STEP_LORA], ids=["base", "adapters"])
def test_it_computes_what_a_scale_a_row_computes(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_in_blocks, "FEWEST_TOKENS", 1)
    blocks, rows = program(bucket), program(bucket, disable=("quantize_in_blocks",))
    assert (
        ops(blocks)["silu_mul_blocks"] == ops(blocks)["paged_attention_blocks"] == 2
        and not ops(rows)["silu_mul_blocks"]
    )
    assert 0 < relative(logits(blocks, [1, -1, 0]), logits(rows, [1, -1, 0])) < 0.08
