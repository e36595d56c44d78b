"""Every family through the whole pipeline against transformers and peft: mixed adapters in one batch, prompts in
chunks, decode steps, and torch.compile.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.compiler.options import CompileOptions
from support.compiled import CompiledRunner
from support.families import FAMILIES, tiny_family
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters
from torch.nn.functional import kl_div, log_softmax

TOLERANCE = 1e-4
SPECS = [AdapterSpec(rank=4, targets=("q_proj", "v_proj")), AdapterSpec(rank=24, use_rslora=True)]
PACKED_SPECS = [
    AdapterSpec(rank=4, targets=("qkv_proj",)),
    AdapterSpec(rank=24, use_rslora=True, targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
]

IN_BOTH_KINDS = ("qwen2", "qwen3", "smollm3")


def logits_of(runner: PagedRunner, sequences: list[list[int]]) -> torch.Tensor:
    """Three sequences (adapter 0, none, adapter 1) in one batch: prompts in chunks, then decode steps."""
    done, parts = [0, 0, 0], [[], [], []]
    for sizes in ((7, 60, 5), (3, 20, 1), (1, 1, 1)):
        chunks = [Chunk(i, sequences[i][done[i] : done[i] + size], (0, -1, 1)[i]) for i, size in enumerate(sizes)]
        for i, logits in enumerate(runner.step(chunks)):
            parts[i].append(logits)
            done[i] += sizes[i]
    return torch.cat([torch.cat(part) for part in parts])


def expected(base: TinyBase, adapters: list[Path], sequences: list[list[int]]) -> torch.Tensor:
    chosen = (adapters[0], None, adapters[1])
    return torch.cat([oracle_logits(base, *pair) for pair in zip(chosen, sequences, strict=True)])


def divergence(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(kl_div(log_softmax(got, -1), log_softmax(want, -1), log_target=True, reduction="batchmean"))


@pytest.fixture(scope="module", params=FAMILIES)
def drawn(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyBase, list[Path], list[list[int]]]:
    dice = random.Random(request.param)
    base = tiny_family(tmp_path_factory.mktemp(request.param), request.param, dice)
    sequences = [[dice.randrange(320) for _ in range(length)] for length in (11, 81, 7)]
    return base, tiny_adapters(base, PACKED_SPECS if request.param.startswith("phi3") else SPECS), sequences


def test_the_plain_and_the_compiled_model_equal_transformers_and_peft(drawn: Any) -> None:
    base, adapters, sequences = drawn
    model, _ = plain_model(base, adapters)
    want = expected(base, adapters, sequences)
    for runner in (PagedRunner(model, 3, padding=2), CompiledRunner(model, CompileOptions(precision="fp32"), 3)):
        torch.testing.assert_close(logits_of(runner, sequences), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_eight_bits_stay_near(drawn: Any, precision: str, request: pytest.FixtureRequest) -> None:
    """Families take turns with the two precisions; with --exhaustive each has both."""
    turn = list(FAMILIES).index(request.node.callspec.params["drawn"]) % 2
    if precision != ("int8", "fp8")[turn] and not request.config.getoption("--exhaustive"):
        pytest.skip("the other precision is this family's; run with --exhaustive")
    base, adapters, sequences = drawn
    model, _ = plain_model(base, adapters, torch.bfloat16)
    got = logits_of(CompiledRunner(model, CompileOptions(precision=precision), 3), sequences)
    kl = divergence(got, expected(base, adapters, sequences))
    assert 1e-9 < kl < 2e-2, f"mean KL {kl}"


def test_multipliers_cost_no_kernel_in_a_layer(tmp_path: Path) -> None:
    base = tiny_family(tmp_path, "granite", random.Random(1), num_hidden_layers=2)
    model, _ = plain_model(base)
    compiled = CompiledRunner(model, CompileOptions(precision="int8"), 1).compiled
    assert {record.name: record.matches for record in compiled.records}["fold_multipliers"] == 2 * 2 + 1
    assert compiled.records[-1].ops_after["aten.mul.Tensor"] == 1  # the embedding's


def test_torch_compile_equals_the_module_itself(drawn: Any, request: pytest.FixtureRequest) -> None:
    """Where the model with a window has a layer without one too, it stands for the family; with --exhaustive all."""
    if request.node.callspec.params["drawn"] in IN_BOTH_KINDS and not request.config.getoption("--exhaustive"):
        pytest.skip("the model with a window has such layers too; run with --exhaustive")
    base, adapters, _ = drawn
    module = base.adapted(adapters[1])
    compiled = torch.compile(module, backend="sidestream")
    with torch.no_grad():
        ids = torch.randint(0, 320, (2, 40))
        want = module(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, want, atol=TOLERANCE, rtol=0)
    torch._dynamo.reset()
