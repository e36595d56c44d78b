"""Sliding windows from the config to every program: each form of attention keeps its layer's, and reads no more."""

from functools import cache

import pytest
from sidestream.compiler.cost.bytes_and_flops import Assumptions, step_bytes, windows_of, work
from sidestream.compiler.inspect.explain import explain_program, program_as_text
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.lora import LoraShape
from support.meta import compiled_without_weights
from support.meta_model import DECODE, DECODE_BASE, FIELDS, MIXED

WINDOW = 100
FAMILY = {
    **FIELDS,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "head_dim": 128,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
BUCKETS = [
    DECODE,
    DECODE_BASE,
    MIXED,
    Bucket(tokens=24, sequences=24, pages=200, blocks=8, decode=True, lora=False),  # scales by block
    Bucket(tokens=1024, sequences=8, pages=200, blocks=16),  # wide keys and values, where nothing has a window
    Bucket(tokens=32, sequences=8, pages=65, blocks=8, rows=4),  # drafts are verified
]


@cache
def program_of(bucket: Bucket, precision: str = "int8", tensor_parallel: int = 1, windowed: bool = True) -> Program:
    options = CompileOptions(precision=precision, tensor_parallel=tensor_parallel)
    fields = {**FAMILY, "use_sliding_window": windowed}
    return compiled_without_weights(fields, LoraShape(4, 16), options, options.model_dtype).program(bucket)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_every_program_keeps_the_windows_of_its_layers(precision: str, tensor_parallel: int) -> None:
    for bucket in BUCKETS:
        program = program_of(bucket, precision, tensor_parallel)
        attentions = [step.op for step in program.steps if "paged_attention" in step.op]
        assert len(attentions) == 3 and windows_of(program) == {WINDOW: 2}, (program.name, attentions)
        assert windows_of(Program.decoded(program.encoded(), lambda data: data)) == {WINDOW: 2}


def test_the_forms_that_fuse_are_among_them() -> None:
    forms = {step.op for bucket in BUCKETS for step in program_of(bucket).steps if "paged_attention" in step.op}
    assert forms == {"sidestream.paged_attention_quant", "sidestream.paged_attention_blocks"}
    wide = program_of(BUCKETS[4])
    assert sum(step.op == "sidestream.widen_kv" for step in wide.steps) == 1  # of the layer without a window


def test_a_window_bounds_what_attention_reads_and_multiplies() -> None:
    long = Assumptions(context=500)
    for bucket, own in ((DECODE_BASE, 1), (MIXED, 32)):
        windowed, whole, _ = [step for step in program_of(bucket).steps if "paged_attention" in step.op]
        program = program_of(bucket)
        cached = 2 * 2 * (128 + 4)  # two KV heads: K and V in eight bits, and their scales
        fewer = step_bytes(program, whole, long) - step_bytes(program, windowed, long)
        assert fewer == 8 * cached * (500 - (WINDOW + own - 1))
        flops = work(program, windowed, long).total_flops
        assert flops == pytest.approx(bucket.tokens * WINDOW * 4 * 128 * 4)
        short = Assumptions(context=60)
        assert work(program, windowed, short).total_flops == work(program, whole, short).total_flops


def test_explain_names_windows_where_there_are_some() -> None:
    text = program_as_text(explain_program(program_of(DECODE)))
    assert f"2 of its attentions read only the newest {WINDOW} tokens of a sequence" in text
    assert "newest" not in program_as_text(explain_program(program_of(DECODE, windowed=False)))
