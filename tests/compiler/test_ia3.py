"""IA3 against transformers and peft: families, targets, mixed batches, eight bits."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.compiler.options import CompileOptions
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.adapter_config import AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from support.compiled import CompiledRunner
from support.families import tiny_family
from support.ia3 import EVERYWHERE, OUTPUTS, PAPER, ia3_adapters
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_llama, tiny_model
from torch.nn.functional import kl_div, log_softmax

TOLERANCE = 1e-4
WEIGHTS = "adapter_model.safetensors"
PHI = [
    {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    {"target_modules": r".*\.(o_proj|down_proj)", "feedforward_modules": r".*\.down_proj"},
]
BASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "llama": ({"mlp_bias": True, "attention_bias": True, "num_hidden_layers": 1}, [PAPER, EVERYWHERE, OUTPUTS]),
    "qwen2": ({}, [PAPER, EVERYWHERE]),
    "granite": ({}, [PAPER, EVERYWHERE]),
    "qwen3": ({}, [EVERYWHERE]),
    "phi3-narrow": ({}, PHI),
    "phi3-partial": ({}, PHI),
}


def divergence(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(kl_div(log_softmax(got, -1), log_softmax(want, -1), log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("family", BASES)
def test_a_mixed_batch_equals_peft(tmp_path: Path, family: str) -> None:
    """IA3, LoRA, DoRA and the base: prompts in two chunks, then a decode step."""
    fields, settings = BASES[family]
    dice = random.Random(family)
    base = tiny_llama(tmp_path, **fields) if family == "llama" else tiny_family(tmp_path, family, dice, **fields)
    others = [
        AdapterSpec(rank=4, targets=("o_proj",)),
        AdapterSpec(rank=8, targets="all-linear", extra={"use_dora": True}),
    ]
    adapters = [*ia3_adapters(base, settings), *tiny_adapters(base, others)]
    config = LlamaConfig.from_directory(base.path)
    assert [load_adapter(each, config, 64).rank for each in adapters] == [0] * len(settings) + [4, 8]
    model, _ = plain_model(base, adapters)
    count = len(adapters)
    sequences = [[dice.randrange(320) for _ in range(dice.randrange(12, 90))] for _ in range(count + 1)]
    want = [oracle_logits(base, *pair) for pair in zip([*adapters, None], sequences, strict=True)]
    assert (want[0] - oracle_logits(base, None, sequences[0])).abs().max() > 100 * TOLERANCE
    options = CompileOptions(precision="fp32", rotate_values=True)
    for runner in (PagedRunner(model, count + 1, padding=2), CompiledRunner(model, options, count + 1)):
        pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
        for first, last in ((0, -9), (-9, -1), (-1, None)):
            chunks = [Chunk(i, tokens[first:last], i if i < count else -1) for i, tokens in enumerate(sequences)]
            for place, logits in enumerate(runner.step(chunks)):
                pieces[place].append(logits)
        for got, expected in zip(pieces, want, strict=True):
            torch.testing.assert_close(torch.cat(got), expected, atol=TOLERANCE, rtol=0)


def test_eight_bits_are_as_near_as_those_of_the_merged_model(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    (adapter,) = ia3_adapters(base, [EVERYWHERE])
    tokens = torch.randint(0, 320, (200,)).tolist()
    want = oracle_logits(base, adapter, tokens)
    copy.deepcopy(base.adapted(adapter)).merge_and_unload().save_pretrained(tmp_path / "merged")

    def logits(model: Llama, *slots: int) -> torch.Tensor:
        options = CompileOptions(precision="int8", rotate_values=True)
        chunks = [Chunk(place, tokens[50 * place :], slot) for place, slot in enumerate(slots)]
        return CompiledRunner(model, options, len(slots)).step(chunks)[0]

    merged, _ = plain_model(TinyBase(tmp_path / "merged"), dtype=torch.bfloat16)
    ours, _ = plain_model(base, [adapter, *tiny_adapters(base, [AdapterSpec(rank=4)])], torch.bfloat16)
    alone = logits(ours, 0)
    assert 1e-9 < divergence(alone, want) < 1.5 * divergence(logits(merged, -1), want)
    assert torch.equal(alone, logits(ours, 0, 1, -1))


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Attention, and the MLP of a layer without experts; experts are refused by name."""
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    base = tiny_model(tmp_path, "Qwen3Moe", **fields)
    (adapter,) = ia3_adapters(base, [PAPER])
    model, _ = plain_model(base, [adapter])
    tokens = torch.randint(0, 320, (40,)).tolist()
    (got,) = CompiledRunner(model, CompileOptions(precision="fp32"), 1).step([Chunk(0, tokens, 0)])
    torch.testing.assert_close(got, oracle_logits(base, adapter, tokens), atol=TOLERANCE, rtol=0)
    tensors = load_file(adapter / WEIGHTS)
    expert = {"base_model.model.model.layers.1.mlp.experts.0.down_proj.ia3_l": torch.ones(1, 64)}
    save_file(tensors | expert, adapter / WEIGHTS)
    with pytest.raises(AdapterError, match=r"experts.0.down_proj.ia3_l' is of a router or expert, .* IA3"):
        load_adapter(adapter, LlamaConfig.from_directory(base.path), 64)
