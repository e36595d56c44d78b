"""DoRA, biases of B and trained biases against transformers and peft: families, mixed batches, eight bits."""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import TARGETS, LoraShape
from support.compiled import CompiledRunner
from support.families import tiny_family
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_llama
from torch.nn.functional import kl_div, log_softmax

TOLERANCE = 1e-4
DORA = AdapterSpec(rank=8, use_rslora=True, extra={"use_dora": True})
LORA_BIAS = AdapterSpec(rank=4, alpha=6, targets=("q_proj", "v_proj", "o_proj", "up_proj"), extra={"lora_bias": True})
LORA = AdapterSpec(rank=16)
BIASES = [
    AdapterSpec(rank=4, targets=("k_proj", "v_proj", "down_proj"), extra={"bias": "lora_only"}),
    AdapterSpec(rank=4, targets=("o_proj",), extra={"bias": "all"}),  # also of q, k and v, which have no LoRA
    AdapterSpec(rank=4, extra={"bias": "all", "use_dora": True}),
]
PACKED = [
    AdapterSpec(rank=4, targets=("qkv_proj", "down_proj"), extra={"use_dora": True}),
    AdapterSpec(rank=8, targets=("qkv_proj", "o_proj", "gate_up_proj"), extra={"lora_bias": True}),
]
BASES: dict[str, tuple[str, dict[str, Any], list[AdapterSpec]]] = {
    "tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}, []),
    "narrow heads": ("llama-narrow", {}, []),
    "biases": ("qwen2", {}, BIASES),
    "biases, multipliers": ("granite", {}, BIASES),
    "packed, padded heads": ("phi3-narrow", {}, PACKED),
}


def run_mixed(runner: PagedRunner, sequences: list[list[int]], count: int) -> list[torch.Tensor]:
    """Sequence i with adapter i, the last one without: prompts in two chunks, then a decode step; logits [S, V]."""
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    for first, last in ((0, -9), (-9, -1), (-1, None)):
        chunks = [Chunk(i, tokens[first:last], i if i < count else -1) for i, tokens in enumerate(sequences)]
        for place, logits in enumerate(runner.step(chunks)):
            pieces[place].append(logits)
    return [torch.cat(each) for each in pieces]


def divergence(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(kl_div(log_softmax(got, -1), log_softmax(want, -1), log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_gain_on_values_that_the_weights_rotate(tmp_path: Path, precision: Any, rotate: bool) -> None:
    base = tiny_llama(tmp_path)
    (adapter,) = tiny_adapters(base, [AdapterSpec(rank=8, targets=("v_proj",), extra={"use_dora": True})])
    gains = load_adapter(adapter, LlamaConfig.from_directory(base.path), 64)
    tokens = torch.randint(0, 320, (60,)).tolist()
    model, _ = plain_model(base, [adapter], torch.float32 if precision == "fp32" else torch.bfloat16)
    runner = CompiledRunner(model, CompileOptions(precision=precision, rotate_values=rotate), 1)
    (got,) = runner.step([Chunk(0, tokens, 0)])
    want = oracle_logits(base, adapter, tokens)
    assert gains.kinds == ("dora",) and divergence(want, oracle_logits(base, None, tokens)) > 0.05
    if precision == "fp32":
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
    else:
        assert divergence(got, want) < 5e-3


@pytest.mark.parametrize("name", BASES)
def test_all_kinds_in_one_batch_equal_peft(tmp_path: Path, name: str) -> None:
    family, fields, more = BASES[name]
    dice = random.Random(name)
    base = tiny_llama(tmp_path, **fields) if family == "llama" else tiny_family(tmp_path, family, dice, **fields)
    adapters = tiny_adapters(base, more if family.startswith("phi3") else [DORA, LORA, LORA_BIAS, *more])
    model, _ = plain_model(base, adapters)
    sequences = [[dice.randrange(320) for _ in range(dice.randrange(12, 90))] for _ in range(len(adapters) + 1)]
    want = [oracle_logits(base, *pair) for pair in zip([*adapters, None], sequences, strict=True)]
    count = len(adapters)
    options = CompileOptions(precision="fp32", rotate_values=True)
    for runner in (PagedRunner(model, count + 1, padding=2), CompiledRunner(model, options, count + 1)):
        for got, expected in zip(run_mixed(runner, sequences, count), want, strict=True):
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_eight_bits_are_as_near_as_those_of_the_merged_model(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    (adapter,) = tiny_adapters(base, [DORA])
    tokens = torch.randint(0, 320, (200,)).tolist()
    want = oracle_logits(base, adapter, tokens)
    copy.deepcopy(base.adapted(adapter)).merge_and_unload().save_pretrained(tmp_path / "merged")

    def kl(model: Llama, slot: int) -> float:
        options = CompileOptions(precision="int8", rotate_values=True)
        return divergence(CompiledRunner(model, options, 1).step([Chunk(0, tokens, slot)])[0], want)

    merged, _ = plain_model(TinyBase(tmp_path / "merged"), dtype=torch.bfloat16)
    ours, _ = plain_model(base, [adapter], torch.bfloat16)
    assert 1e-9 < kl(ours, 0) < 1.5 * kl(merged, -1)


def test_programs_without_parts_are_those_of_stacks_without_parts(tmp_path: Path) -> None:
    """Also with biases, whose addition moves behind the gain; only the full program has the new op."""
    base = tiny_family(tmp_path, "qwen2", random.Random(1))
    config = LlamaConfig.from_directory(base.path)
    options = CompileOptions(precision="int8")
    kinds = [Bucket(8, 8, 9, 1, decode=True), Bucket(8, 8, 9, 1, decode=True, lora=False), Bucket(300, 4, 9, 8)]

    def programs(*parts: str) -> list[dict[str, Any]]:
        model = Llama(config, LoraShape(2, 16, parts=parts), torch.bfloat16, "meta")
        compiled = sidestream.compile(model, options, text=False)
        return [json.loads(compiled.program(kind).encoded()) for kind in kinds]

    def ops(parts: tuple[str, ...], kind: Bucket) -> list[str]:
        model = Llama(config, LoraShape(2, 16, parts=parts), torch.bfloat16, "meta")
        return [step.op for step in sidestream.compile(model, options, text=False).program(kind).steps]

    for without, with_parts in zip(programs(), programs("dora", "bias"), strict=True):
        assert without["steps"] == with_parts["steps"] and without["recipes"] == with_parts["recipes"]
        assert "lora_adjust" not in str(with_parts)
    full = ops(("dora", "bias"), replace(kinds[0], parts=True))
    assert full.count("sidestream.lora_adjust") == 4 * config.num_hidden_layers


def test_keys_of_caches_without_parts() -> None:
    assert LoraShape(2, 16).key == {"slots": 2, "rank": 16, "targets": TARGETS}
    assert LoraShape(2, 16, parts=("bias",)).key["parts"] == ("bias",)
    sizes = {"tokens": 8, "sequences": 8, "pages": 9, "blocks": 1, "decode": True, "lora": True, "rows": 1}
    assert Bucket(**sizes).key == sizes and Bucket(**sizes, parts=True).key == sizes | {"parts": True}


def test_torch_compile_of_peft_itself(tmp_path: Path) -> None:
    base = tiny_family(tmp_path, "qwen2", random.Random(2))
    (adapter,) = tiny_adapters(base, [AdapterSpec(rank=8, extra={"use_dora": True, "bias": "all"})])
    module, ids = base.adapted(adapter), torch.randint(0, 320, (2, 40))
    with torch.no_grad():
        # how much of DoRA Dynamo captures depends on its release
        compiled = torch.compile(module, backend="sidestream", options={"check_counts": False})
        got = compiled(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(got, module(input_ids=ids, use_cache=False).logits, atol=TOLERANCE, rtol=0)
    torch._dynamo.reset()
