"""Programs for steps with drafts: several rows a sequence, logits of every row, and queries as exact as decode's."""

from dataclasses import replace

import pytest
from sidestream.compiler.cost.resources import program_resources
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Bucket, Program, ProgramError
from sidestream.ops.core.registry import OPS
from sidestream.ops.core.triton_support import INTERPRETED
from support.meta_model import compiled_llama

VERIFY = Bucket(tokens=32, sequences=8, pages=65, blocks=8, rows=4)


def attention_flags(program: Program) -> set[tuple[bool, bool]]:
    """(quantize_q, decode) of the program's attentions."""
    found = set()
    for step in program.steps:
        if "paged_attention" in step.op:
            names = [each.name for each in OPS[step.op.removeprefix("sidestream.")].overload._schema.arguments]
            found.add((step.args[names.index("quantize_q")], step.args[names.index("decode")]))
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
        assert attention_flags(program) == {(False, False)}
        assert any("lora" in step.op for step in program.steps) == lora
        assert any(step.stream == "side" for step in program.steps) == lora
        assert Program.decoded(program.encoded(), lambda data: data).bucket == program.bucket
        assert program.name == f"verify_t32_b8_p8_{'lora' if lora else 'base'}"
    assert (True, False) in attention_flags(mixed) or precision != "fp8"


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
