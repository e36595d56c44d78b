"""No step compiles a kernel: the programs of the start launch all kernels of later programs."""

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from sidestream.compiler.api import CompiledModel, compile_model
from sidestream.compiler.cost.machine_code import compile_launch, target_here
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.buffers import View
from sidestream.compiler.program.calls import own_op
from sidestream.compiler.program.program import Bucket, Program, Step
from sidestream.compiler.run.kernel_compilation import Compilations, CompiledInStep
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.families import EXPERT_TARGETS
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import TARGETS, LoraShape
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.runtime.worker.buckets import Buckets
from triton import knobs

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "llama-3.1-8b, int8": ({}, "int8"),
    "mistral's window, fp8": (
        {"sliding_window": 4096, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        "fp8",
    ),
    "experts as in qwen3-30b-a3b, int8": (
        {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 2048,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
        "int8",
    ),
    "narrow heads, bf16": ({"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}, "bf16"),
}


def compiled(changes: dict[str, Any], precision: str) -> CompiledModel:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        **changes,
    }
    options = CompileOptions(precision=precision)
    config = LlamaConfig.from_dict(fields)
    targets = TARGETS + EXPERT_TARGETS if config.num_experts else TARGETS
    model = Llama(config, LoraShape(8, 32, targets), dtype=options.model_dtype, device="meta")
    return compile_model(model, options, text=False)


def variants(programs: Iterable[Program]) -> set[tuple[str, str]]:
    """(kernel, Triton's key of its specialization) of everything that the programs launch on Hopper."""
    found: set[tuple[str, str]] = set()
    launched: set[str] = set()

    def note(**launch: Any) -> bool:
        found.add((launch["fn"].name, str(launch["key"])))
        return True  # compile nothing

    with (
        patch.object(knobs.runtime, "jit_cache_hook", note),
        patch.object(torch, "_scaled_mm", lambda *_, out, **__: out),
        patch("sidestream.compiler.cost.machine_code._read", lambda *_: None),
    ):
        for program in programs:
            for step in program.steps:
                op = own_op(step.op)
                key = described(program, step)
                if op is None or key in launched:
                    continue
                launched.add(key)
                args, outs = [on_meta(program, each) for each in step.args], [on_meta(program, o) for o in step.outs]
                compile_launch(
                    op.launch, *args, out=tuple(outs), sm_budget=step.sm_budget, pdl=step.pdl, target=target_here()
                )
    return found


def described(program: Program, step: Step) -> str:
    return repr((step.op, [on_meta(program, each) for each in (*step.args, *step.outs)], step.sm_budget, step.pdl))


def on_meta(program: Program, value: Any) -> Any:
    if isinstance(value, View):
        dtype = value.dtype or program.by_name[value.buffer].dtype
        return torch.empty_strided(value.shape, value.stride, dtype=dtype, device="meta")
    return [on_meta(program, each) for each in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", SHAPES)
def test_later_programs_launch_only_kernels_of_the_start(name: str) -> None:
    model = compiled(*SHAPES[name])
    buckets = Buckets(256, 1024, 512, 128, lora=True)

    def programs(wanted: Iterable[Bucket]) -> Iterable[Program]:
        return (model.program(bucket) for bucket in wanted)

    start = variants(programs([*buckets.warm_up_buckets(), *buckets.captured_buckets()]))
    later = variants(programs(buckets.later_buckets()))
    assert start and later
    assert sorted(kernel for kernel, _ in later - start) == []


@triton.jit
def _fill_kernel(values, BLOCK: tl.constexpr):
    tl.store(values + tl.arange(0, BLOCK), 1.0)


def fill(block: int) -> None:
    """Compile, and not launch, a kernel that no other test has."""
    values = torch.empty(block, device="meta")
    compile_launch(lambda: _fill_kernel[(1,)](values, BLOCK=block))


def test_a_compilation_is_counted_where_it_is_watched() -> None:
    compilations = Compilations()
    fill(16)
    with compilations.watch():
        fill(16)  # compiled before
    assert compilations.count == 0
    with compilations.watch():
        fill(32)
        fill(64)
    fill(128)
    assert compilations.count == 2


def test_a_compilation_is_refused_by_name() -> None:
    with Compilations(fail=True).watch(), pytest.raises(CompiledInStep, match=r"_fill_kernel.*fail_on_compilation"):
        fill(256)
    fill(256)  # only what is watched is refused
