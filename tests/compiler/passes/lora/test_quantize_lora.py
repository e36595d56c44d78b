"""Adapters in eight bits: right logits by those of 16-bit adapters, whatever the shrink reads, lowered or not."""

import copy
from typing import Any

import pytest
import torch
from sidestream.compiler.graph.materialize import quantize_weight
from sidestream.compiler.options import CompileOptions, torch_dtype
from support.compiled import CompiledRunner
from support.paged import Chunk, plain_model
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama

PROMPTS = [list(range(7, 47)), list(range(90, 101)), list(range(200, 230))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    return plain_model(base, tiny_adapters(base, [AdapterSpec(16, 64), AdapterSpec(7, 64)]), torch.bfloat16)[0]


def logits(model: Any, **options: Any) -> torch.Tensor:
    """Prompts with adapter 0, without one, and with adapter 1, then a decode step."""
    runner = CompiledRunner(model, CompileOptions(**options), len(PROMPTS))
    slots = (0, -1, 1)
    prefill = runner.step(
        [Chunk(index, tokens, slot) for index, (tokens, slot) in enumerate(zip(PROMPTS, slots, strict=True))]
    )
    decode = runner.step([Chunk(index, [3], slot) for index, slot in enumerate(slots)])
    return torch.cat([*prefill, *decode])


PRECISIONS = pytest.mark.parametrize("precision", ["fp8", "int8"])


def dequantized(model: Any, precision: str) -> Any:
    """The model with its adapters' rows rounded to eight bits and back."""
    again = copy.deepcopy(model)
    for name, stack in again.named_buffers():
        if name.endswith((".lora_a", ".lora_b")):
            values, scale = quantize_weight(stack, torch_dtype(precision))
            stack.copy_(values.float() * scale.unsqueeze(-1))
    return again


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).pow(2).mean().sqrt() / expected.std())


@PRECISIONS
def test_logits_are_those_of_the_dequantized_adapters(model: Any, precision: str) -> None:
    wide: dict[str, Any] = {"precision": precision, "kv_dtype": "bf16", "disable": ("quantize_linears",)}
    found = logits(model, lora_dtype=precision, **wide)
    expected, plain = (
        logits(dequantized(model, precision), lora_dtype="bf16", **wide),
        logits(model, lora_dtype="bf16", **wide),
    )
    assert error(found, expected) < 0.02 and not torch.equal(found, plain)
    assert precision == "int8" or error(found, plain) > 0.02  # int8 lies as near to 16 bits as 16 bits to themselves
    untouched = slice(len(PROMPTS[0]), len(PROMPTS[0]) + len(PROMPTS[1]))
    assert torch.equal(found[untouched], plain[untouched]), (
        "tokens without an adapter do not see how adapters are stored"
    )


@PRECISIONS
@pytest.mark.parametrize("lora_input", ["bf16", "auto"])
def test_quantized_linears_next_to_quantized_adapters(model: Any, lora_input: str, precision: str) -> None:
    found, most = (
        logits(model, precision=precision, lora_dtype=precision, lora_input=lora_input),
        {"fp8": 0.15, "int8": 0.05}[precision],
    )
    assert error(found, logits(dequantized(model, precision), precision=precision, lora_dtype="bf16")) < most
    assert (
        error(
            logits(model, precision=precision, lora_dtype=precision, lora_input=lora_input, disable=("lower_lora",)),
            found,
        )
        < most
    )
