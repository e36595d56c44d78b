"""Programs for steps with drafts: several rows a sequence, logits of every row, and queries as exact as decode's."""

from dataclasses import replace

import pytest
from sidestream.compiler.cost.kernel_resources import program_resources
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Bucket, Program, ProgramError
from sidestream.graphs.lora import LoraShape
from sidestream.ops.core.registry import OPS
from sidestream.ops.core.triton_support import INTERPRETED
from support.meta import compiled_without_weights
from support.meta_model import FIELDS, compiled_llama

VERIFY = Bucket(tokens=32, sequences=8, pages=65, blocks=8, rows=4)


def attention_arguments(program: Program, *wanted: str) -> set[tuple[object, ...]]:
    """These arguments of the program's attentions, None where an op lacks them."""
    found = set()
    for step in program.steps:
        if "paged_attention" in step.op:
            names = [each.name for each in OPS[step.op.removeprefix("sidestream.")].overload._schema.arguments]
            given = dict(zip(names, step.args, strict=False))
            found.add(tuple(given.get(name) for name in wanted))
    return found


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_every_row_has_logits_and_queries_stay_as_they_are(precision):
    compiled = compiled_llama(CompileOptions(precision=precision))
    mixed = compiled.program(replace(VERIFY, rows=1))
    for lora in (True, False):
        program = compiled.program(replace(VERIFY, lora=lora))
        (logits,) = program.of_kind("output")
        assert logits.shape[0] == 32 and mixed.of_kind("output")[0].shape[0] == 8
        inputs = {buffer.name: buffer.shape[0] for buffer in program.of_kind("input")}
        assert "logits_indices" not in inputs
        assert (inputs["context_lens"], inputs["query_start"], inputs["positions"]) == (8, 9, 32)
        attentions = attention_arguments(program, "quantize_q", "decode", "rows")
        assert attentions in ({(False, False, 4)}, {(None, None, 4)})
        assert any("lora" in step.op for step in program.steps) == lora
        assert any(step.stream == "side" for step in program.steps) == lora
        assert Program.decoded(program.encoded(), lambda data: data).bucket == program.bucket
        assert program.name == f"verify_t32_b8_p8_{'lora' if lora else 'base'}"
    assert (True, False, 0) in attention_arguments(mixed, "quantize_q", "decode", "rows") or precision != "fp8"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("sequences", "rows"), [(1, 8), (4, 8), (16, 2), (16, 4), (32, 8)])
@pytest.mark.parametrize("whole_layer", ["auto", "on"])
def test_to_linears_it_is_a_decode_step_of_as_many_tokens(lora, sequences, rows, whole_layer):
    """Each launch but attention's takes what the decode program's takes; all passes of decode programs have run."""
    fields = {**FIELDS, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "head_dim": 128}
    options = CompileOptions(whole_layer=whole_layer)
    compiled = compiled_without_weights(fields, LoraShape(4, 16) if lora else None, options, options.model_dtype)
    tokens = sequences * rows
    verify = compiled.program(Bucket(tokens, sequences, 65, 8, lora=lora, rows=rows))
    decode = compiled.program(Bucket(tokens, tokens, 65, 8, decode=True, lora=lora))
    assert [step.op for step in verify.steps] == [step.op for step in decode.steps]
    assert ("sidestream.decoder_block" in {step.op for step in verify.steps}) == (
        whole_layer == "on" and not lora and tokens <= 64
    )
    blocks = any(step.op == "sidestream.paged_attention_blocks" for step in verify.steps)
    assert attention_arguments(verify, "rows") == {(rows,)} and blocks == any(
        "blocks" in step.op for step in decode.steps
    )


def test_sizes_that_contradict_each_other():
    for wrong in ({"tokens": 31}, {"rows": 3}, {"tokens": 8, "rows": 4, "decode": True}, {"rows": 0}):
        with pytest.raises(ProgramError, match="rows"):
            replace(VERIFY, **wrong)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under TRITON_INTERPRET=1")
def test_every_kernel_compiles_for_hopper():
    program = compiled_llama().program(replace(VERIFY, lora=False))
    found = program_resources([program])
    assert found.refused == {}
    assert all(found.launches[program.name]), "a step launches nothing"
    assert all(figures["spills"] < 64 for _, figures in found.variants)
