"""LoRA inside the whole-layer launch: what the pass makes of a decode program with adapters, and what it leaves
alone.
"""

from collections import Counter
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.cost.work import Assumptions, work
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Program
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from support.three_tokens import STEP_LORA, logits, relative

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
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def program(rank: int = 32, targets: tuple[str, ...] = ALL, **options: Any) -> Program:
    module = Llama(LlamaConfig.from_dict(FIELDS), LoraShape(2, rank, targets), torch.bfloat16, "meta")
    chosen = {"whole_layer": "on", "lora_lowering": "one_launch", **options}
    return sidestream.compile(module, CompileOptions(**chosen)).program(STEP_LORA)


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


def test_a_layer_with_lora_is_three_launches() -> None:
    made = program()
    counts = ops(made)
    assert counts["decoder_block_lora"] == counts["paged_attention_blocks"] == counts["rope_append"] == 2
    # q/k/v of the first layer
    assert counts["lora_shrink"] == counts["lora_expand"] == 1 and counts["lora_groups"] == 1
    assert "fuse_decoder_block" in made.passes and "refused" not in made.passes


@pytest.mark.parametrize(
    "targets", [ALL, ("q_proj", "k_proj", "v_proj"), ("o_proj", "down_proj")], ids=["all", "qkv", "o and down"]
)
def test_it_computes_what_separate_launches_compute(targets: tuple[str, ...]) -> None:
    fused, separate = program(targets=targets), program(targets=targets, whole_layer="off")
    assert ops(fused)["decoder_block_lora"] >= 1 and ops(fused)["decoder_block_lora"] + ops(fused)["decoder_block"] == 2
    mixed, bare = [1, -1, 0], [-1, -1, -1]
    got, want, without = logits(fused, mixed)[[0, 2]], logits(separate, mixed)[[0, 2]], logits(separate, bare)[[0, 2]]
    assert relative(got, want) < 0.08  # activations are rounded to eight bits in another way
    assert relative(without, want) > 1.4 * relative(got, want)  # LoRA matters


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora_dtype": "bf16"}, "its adapters have 16 bits (lora_dtype)"),
        ({"lora_lowering": "side_stream"}, "a LoRA delta joins between its linears, and lora_lowering is side_stream"),
        ({"lora_lowering": "auto"}, "lora_lowering is auto"),
        ({"rank": 16}, "LoRA stacks of rank 16; it takes 32 or 64"),
    ],
)
def test_what_is_left_alone_gives_its_reason(options: dict[str, Any], reason: str) -> None:
    made = program(**options)
    assert ops(made)["decoder_block_lora"] == ops(made)["decoder_block"] == 0 and reason in made.passes


def test_its_cost_counts_the_active_adapters() -> None:
    made = program()
    step = next(step for step in made.steps if step.op == "sidestream.decoder_block_lora")
    one, two = (work(made, step, Assumptions(adapters=count)) for count in (1, 2))
    # an adapter's A and B in this layer, e4m3
    inputs = 32 * (512 + 2 * 512 + 1024 + 3 * 512) + 32 * (512 + 2048 + 512 + 768)
    assert two.bytes - one.bytes == inputs + 4 * (7 * 32 + 512 + 2048 + 512 + 768) and set(two.flops) == {1}


def test_the_program_is_saved_with_its_stacks() -> None:
    made = program()
    assert Program.from_json(made.to_json()).steps == made.steps
