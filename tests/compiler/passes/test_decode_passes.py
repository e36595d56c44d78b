"""The passes over a decode program's own graph: one launch between two attentions, the last norm's quantization;
switched off, nothing changes.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.lora import TARGETS, LoraShape
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


def program(
    bucket: Bucket = STEP,
    lora: bool = False,
    fields: dict[str, Any] | None = None,
    targets: tuple[str, ...] = TARGETS,
    **options: Any,
) -> Program:
    shape = LoraShape(2, 16, targets) if lora else None
    return compiled_without_weights({**FIELDS, **(fields or {})}, shape, CompileOptions(**options)).program(bucket)


def ops(made: Program) -> Counter[str]:
    return Counter(step.op.removeprefix("sidestream.") for step in made.steps)


def test_a_layer_is_three_launches() -> None:
    made = program(whole_layer="on")
    counts = ops(made)
    assert counts["decoder_block"] == counts["paged_attention_blocks"] == counts["rope_append"] == 2
    # q/k/v of the first layer, lm_head
    assert counts["linear_8bit"] == 2 and counts["rms_norm_quant"] == 2 and len(made.steps) == 12
    assert "fuse_decoder_block" in made.passes and "refused" not in made.passes


@pytest.mark.parametrize(
    ("tokens", "choice", "blocks"), [(1, "auto", 2), (32, "auto", 2), (33, "auto", 0), (64, "on", 2), (32, "off", 0)]
)
def test_where_it_is_chosen_for_the_sizes_of_an_8b_model(tokens: int, choice: str, blocks: int) -> None:
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    made = program(Bucket(tokens, tokens, tokens, 1, decode=True, lora=False), fields=sizes, whole_layer=choice)
    assert ops(made)["decoder_block"] == blocks and ("separate launches are faster" in made.passes) == (
        tokens > 32 and choice == "auto"
    )


def test_the_last_norm_quantizes_where_no_rows_are_selected() -> None:
    counts, mixed = ops(program(whole_layer="off")), ops(program(Bucket(6, 3, 12, 2, lora=False)))
    assert counts["quantize_rowwise"] == 0 and counts["decoder_block"] == 0 and mixed["quantize_rowwise"] == 1


@pytest.mark.parametrize(
    "fields", [{}, {"num_hidden_layers": 1}, {"tie_word_embeddings": True}], ids=["two", "one", "tied"]
)
@pytest.mark.parametrize("lm_head", ["auto", "bf16"])
def test_logits_stay_near_those_of_separate_launches(fields: dict[str, Any], lm_head: str) -> None:
    """Two ways to round the same activations to e4m3: each is off by its rounding."""
    fused, separate = (logits(program(fields=fields, lm_head=lm_head, whole_layer=choice)) for choice in ("on", "off"))
    assert float((fused - separate).norm() / separate.norm()) < 0.08 and not torch.equal(fused, separate)


@pytest.mark.parametrize(
    "options",
    [{"whole_layer": "off"}, {"whole_layer": "on", "disable": ("fuse_decoder_block",)}],
    ids=["option", "disabled"],
)
def test_switched_off_the_layers_stay_apart(options: dict[str, Any]) -> None:
    made = program(**options)
    assert ops(made)["decoder_block"] == 0 and torch.equal(logits(made), logits(program(whole_layer="off")))


def test_wider_rotations_after_norms_are_kept() -> None:
    """A rotation and its inverse cancel but for int8's rounding, in one launch as in separate ones."""
    wide: dict[str, Any] = {"precision": "int8", "norm_rotation": 16}
    made = program(whole_layer="on", **wide)
    assert ops(made)["decoder_block"] == 2 and "refused" not in made.passes
    fused, separate = logits(made), logits(program(whole_layer="off", **wide))
    assert float((fused - separate).norm() / separate.norm()) < 0.05
    assert not torch.equal(fused, logits(program(whole_layer="on", precision="int8")))


def test_auto_leaves_what_would_not_fill_the_gpu() -> None:
    made = program()
    assert ops(made)["decoder_block"] == 0 and "16 CTAs on 132 SMs would be slower" in made.passes


@pytest.mark.parametrize(
    ("bucket", "fields", "reason"),
    [
        (Bucket(65, 65, 200, 2, decode=True, lora=False), {}, "65 tokens; at most 64 are supported"),
        (STEP, {"intermediate_size": 1152}, "intermediate size 1152 is not a multiple of 512"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(bucket: Bucket, fields: dict[str, Any], reason: str) -> None:
    made = program(bucket, False, fields, whole_layer="on")
    assert ops(made)["decoder_block"] == 0 and reason in made.passes


def test_a_program_without_lora_of_a_model_with_lora_is_fused() -> None:
    assert ops(program(lora=True, whole_layer="on"))["decoder_block"] == 2


@pytest.mark.parametrize(
    "targets",
    [TARGETS, ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj",), ("down_proj",)],
    ids=["all", "qkv", "o", "gate", "down"],
)
@pytest.mark.parametrize("lora_dtype", ["bf16", "int8"])
def test_layers_with_lora_are_left_alone(
    lora_dtype: str, targets: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    turn = request.node.callspec.indices["targets"] % 2
    if lora_dtype != ("int8", "bf16")[turn] and not request.config.getoption("--exhaustive"):
        pytest.skip("the other dtype has these targets; run with --exhaustive")
    made = program(STEP_LORA, True, targets=targets, whole_layer="on", lora_dtype=lora_dtype)
    blocks = {("q_proj", "k_proj", "v_proj"): 1}.get(targets, 0)  # after the last layer there is no q/k/v
    assert ops(made)["decoder_block"] == blocks and "a LoRA delta is added between its linears" in made.passes


def test_programs_of_several_tokens_a_sequence_have_other_passes() -> None:
    passes = program(Bucket(6, 3, 12, 2, lora=False), whole_layer="on").passes
    assert "widen_kv_once" in passes and "fuse_decoder_block" not in passes and "quantize_in_blocks" not in passes


def test_what_the_passes_did_is_saved_with_the_program() -> None:
    made = program(whole_layer="on")
    assert Program.decoded(made.encoded()).passes == made.passes


def test_an_unknown_choice_is_told() -> None:
    with pytest.raises(OptionError, match="whole_layer='maybe'"):
        CompileOptions(whole_layer="maybe")  # type: ignore[arg-type]
