"""fuse_linear_silu_mul: the projection of gate and up stores silu(gate) * up in decode programs for which the table
has such a launch.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes.fuse import fuse_silu_mul
from sidestream.compiler.program.program import Bucket, Program
from sidestream.compiler.run.bound_program import BoundProgram
from sidestream.graphs.lora import LoraShape
from sidestream.ops.linear import kernel_selection as tuning
from support.meta import compiled_without_weights

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
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


def program(bucket: Bucket, **options: Any) -> Program:
    lora = LoraShape(2, 16) if bucket.lora else None
    return compiled_without_weights(FIELDS, lora, CompileOptions(whole_layer="off", **options)).program(bucket)


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


def logits(made: Program, tokens: int) -> torch.Tensor:
    """What the program computes from tensors that depend on their names alone."""
    values: dict[str, torch.Tensor] = {}
    for buffer in made.of_kind("input", "weight"):
        random = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(sum(map(ord, buffer.name))))
        values[buffer.name] = (random.abs() * 0.03 + 0.01 if buffer.name.endswith("_scale") else random).to(
            buffer.dtype
        )
    integers = {
        "input_ids": torch.arange(tokens),
        "positions": torch.full((tokens,), 3),
        "slot_mapping": torch.arange(tokens) * 64 + 3,
        "block_table": torch.arange(tokens)[:, None],
        "context_lens": torch.full((tokens,), 4),
        "query_start": torch.arange(tokens + 1),
    }
    values.update(
        {name: value.to(made.by_name[name].dtype) for name, value in integers.items() if name in made.by_name}
    )
    with torch.no_grad():
        return BoundProgram(made, values, "cpu", poison=True).run()[0].float()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fuse_silu_mul,
        "activation_config",
        lambda tokens, n, k, int8: tuning.wide_config(128, 64) if tokens > 4 else None,
    )


def test_one_launch_where_the_table_has_it(measured: None) -> None:
    bucket = Bucket(5, 5, 5, 1, decode=True, lora=False)
    fused, apart = program(bucket), program(bucket, disable=("fuse_linear_silu_mul",))
    assert (
        ops(fused)["linear_8bit_silu_mul"] == 2
        and ops(fused)["silu_mul_quant"] == 0
        and ops(apart)["silu_mul_quant"] == 2
    )
    assert ops(fused)["linear_8bit"] == ops(apart)["linear_8bit"] - 2 and len(fused.steps) == len(apart.steps)
    expected, actual = logits(apart, 5), logits(fused, 5)
    assert expected.std() > 0 and (actual - expected).norm() < 0.05 * expected.norm()


def test_left_alone_where_it_gains_nothing_or_lora_joins(measured: None) -> None:
    few = program(Bucket(4, 4, 4, 1, decode=True, lora=False))
    assert ops(few)["linear_8bit_silu_mul"] == 0 and "two launches are as fast for 4 tokens" in few.passes
    assert ops(program(Bucket(5, 5, 5, 1, decode=True, lora=True)))["linear_8bit_silu_mul"] == 0
    assert ops(program(Bucket(5, 1, 5, 1, decode=False, lora=False)))["linear_8bit_silu_mul"] == 0
