"""Models with experts through the whole pipeline: the compiled model computes what the eager module does, in programs
of every kind, on one rank and on two.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.expected_matches import PassCountError
from sidestream.compiler.graph.materialize import materialize
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.compiler.passes.base import PassReport
from sidestream.compiler.pipeline import EXPERT_PASSES, PASSES
from sidestream.compiler.program.program import Bucket
from sidestream.graphs.families import EXPERT_TARGETS
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import TARGETS
from sidestream.ops.collectives.tensor_parallel_group import RankGroup
from sidestream.ops.moe import grouped_linear
from support.compiled import CompiledRunner
from support.paged import Chunk, PagedRunner
from support.races import find_races
from support.ranks import run_on_ranks
from support.sparse import EXPERTS, KINDS, TOP_K, WIDTH, sparse_model
from torch.nn.functional import kl_div, log_softmax

NEW_PASSES = ("fuse_combine_norm", "lower_experts")
STEPS = ((7, 40, 5), (3, 1, 1))  # tokens of each sequence
# kind of a program -> tokens of each sequence in the step that it computes
BUCKETS = {
    "prompt": (70, 3, 26),
    "mixed": (1, 1, 31),
    "decode": (1, 1, 1),
    "verify": (4, 4, 4),
}


def logits_of(model: Llama, options: CompileOptions | None = None, padding: int = 2) -> torch.Tensor:
    """Logits of all steps of three sequences with adapters 0, 1 and none, eager without options."""
    dice = random.Random(2)
    torch.manual_seed(3)  # the pages of each sequence
    runner = PagedRunner(model, 3, padding=padding)
    if options is not None:
        torch.manual_seed(3)
        runner = CompiledRunner(model, options, 3, padding=padding)
    slots = (0, 1, -1) if model.lora else (-1, -1, -1)
    parts = []
    for sizes in STEPS:
        chunks = [Chunk(i, [dice.randrange(320) for _ in range(size)], slots[i]) for i, size in enumerate(sizes)]
        parts += runner.step(chunks)
    return torch.cat(parts)


def divergence(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(kl_div(log_softmax(got, -1), log_softmax(want, -1), log_target=True, reduction="batchmean"))


@pytest.mark.parametrize(("kind", "lora"), [*((kind, True) for kind in KINDS), ("mixtral", False)])
def test_the_compiled_model_computes_what_the_module_does(kind: str, lora: bool) -> None:
    model = sparse_model(kind, lora)
    got = logits_of(model, CompileOptions(precision="fp32"))
    torch.testing.assert_close(got, logits_of(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "precision"), [("qwen3", "int8"), ("mixtral", "fp8"), ("granite", "bf16")])
def test_rounded_models_stay_near(kind: str, precision: Any) -> None:
    got = logits_of(sparse_model(kind, True, torch.bfloat16), CompileOptions(precision=precision))
    kl = divergence(got, logits_of(sparse_model(kind)))
    assert 1e-9 < kl < 2e-2, f"mean KL {kl}"


@pytest.fixture(scope="module")
def rounded() -> CompiledRunner:
    """A model compiled in int8, whose programs all tests share."""
    return CompiledRunner(sparse_model("mixtral", True, torch.bfloat16), CompileOptions(), 3)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "base"])
@pytest.mark.parametrize("kind", BUCKETS)
def test_programs_of_every_kind(rounded: CompiledRunner, kind: str, lora: bool) -> None:
    """Each has its own passes, tiles and lanes; those without LoRA have neither its ops nor its plan."""
    dice, sizes, slots = random.Random(4), BUCKETS[kind], (0, 1, -1) if lora else (-1, -1, -1)
    every = kind in ("decode", "verify")  # rows have logits
    exact = PagedRunner(sparse_model("mixtral"), 3)
    for runner in (exact, rounded):
        runner.lengths, runner.block_table = [0, 0, 0], exact.block_table
    first = [Chunk(i, [dice.randrange(320) for _ in range(16)], slots[i]) for i in range(3)]
    last = [Chunk(i, [dice.randrange(320) for _ in range(size)], slots[i]) for i, size in enumerate(sizes)]
    exact.step(first)
    rounded.step(first)
    want = torch.cat([logits if every else logits[-1:] for logits in exact.step(last)])
    rows = sizes[0] if kind == "verify" else 1
    bucket = Bucket(sum(sizes), 3, 13, 4, decode=kind == "decode", lora=lora, rows=rows)
    compiled = rounded.compiled
    inputs = compiled._flatten((), {**rounded.inputs(last, all_logits=False), **rounded.extra})
    tensors = {**compiled._module_weights(torch.device("cpu")), **inputs}
    (got,) = compiled.bind(bucket, tensors, poison=True).run()
    kl = divergence(got.float(), want)
    assert 1e-9 < kl < 2e-2, f"mean KL {kl}"
    program = compiled.program(bucket)
    ops = [step.op.removeprefix("sidestream.") for step in program.steps]
    assert ops.count("group_plan") == (2 if lora else 1) and ops.count("moe_route") == 1
    assert ops.count("grouped_linear_8bit_silu_mul") == (every and not lora)
    assert ("expert_groups" in ops) == lora and (lora or all(step.stream == "main" for step in program.steps))
    assert "moe_combine" not in ops and "expert_linear_8bit" not in ops
    assert find_races(program) == []


def test_padding_reads_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    pairs_of_groups = grouped_linear.pairs_of_groups

    def counted(*plan: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        found = pairs_of_groups(*plan)
        computed.append(sum(len(pairs) for _, pairs in found))
        return found

    monkeypatch.setattr(grouped_linear, "pairs_of_groups", counted)
    padded = CompiledRunner(sparse_model("mixtral", False), CompileOptions(precision="fp32"), 1, padding=30)
    padded.step([Chunk(0, [5, 6])])
    assert computed == [2 * TOP_K] * 2  # gate_up and down


@pytest.mark.parametrize("off", [*NEW_PASSES, "fuse_silu_mul", "lower_lora"])
def test_without_a_pass_the_model_computes_the_same(off: str) -> None:
    model = sparse_model("mixtral")
    got = logits_of(model, CompileOptions(precision="fp32", disable=(off,)))
    torch.testing.assert_close(got, logits_of(model), atol=1e-4, rtol=0)


def counts_of(model: Llama, **options: Any) -> dict[str, int]:
    records = sidestream.compile(model, CompileOptions(**options), text=False).records
    return {record.name: record.matches for record in records}


@pytest.mark.parametrize(
    ("targets", "branches"),
    [((*TARGETS, *EXPERT_TARGETS), 4 + 5), (("router", "experts_gate_up", "up_proj"), 1 + 2), ((), 0)],
    ids=["all", "gate_up", "none"],
)
def test_counts_follow_from_the_config(targets: tuple[str, ...], branches: int) -> None:
    """Of two layers the first is dense."""
    counts = counts_of(sparse_model("mixtral", bool(targets), torch.bfloat16, "meta", targets))
    assert counts["quantize_linears"] == 4 * 2 + 1 and counts["pack_projections"] == 2 + 1
    assert counts["fuse_silu_mul"] == 2 and counts["fuse_quantize"] == 4 * 2
    assert counts["fuse_combine_norm"] == 1 and counts["lower_experts"] == 2
    assert counts["lower_lora"] == branches


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"disable": ("pack_projections",)},
        {"disable": ("lift_rms_norm",)},
        {"disable": ("quantize_linears",)},
        {"tensor_parallel": 2, "smooth_channels": True, "rounded_weights": True},
    ],
    ids=str,
)
def test_counts_follow_from_the_options(options: dict[str, Any]) -> None:
    assert counts_of(sparse_model("mixtral", True, torch.bfloat16, "meta"), **options)["lower_experts"] == 2


@pytest.mark.parametrize("blind", [*NEW_PASSES, "quantize_linears", "fuse_silu_mul", "quantize_lora", "lower_lora"])
def test_a_pass_that_matches_nothing_fails_the_compilation(blind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(graph: Any, context: Any) -> PassReport:
        return PassReport(0, ["it is blind"])

    run.__name__ = blind
    passes = tuple(replace(each, run=run) if each.name == blind else each for each in PASSES)
    for place, each in EXPERT_PASSES.items():
        if each.name == blind:
            monkeypatch.setitem(EXPERT_PASSES, place, replace(each, run=run))
    with pytest.raises(PassCountError, match=f"pass {blind} matched 0 times(.|\\n)*it is blind"):
        sidestream.compile(sparse_model("mixtral", True, torch.bfloat16, "meta"), passes=passes)


def test_reasons_of_passes_that_leave_layers_with_experts() -> None:
    options = CompileOptions(smooth_channels=True, rounded_weights=True, whole_layer="on")
    compiled = sidestream.compile(sparse_model("mixtral", False, torch.bfloat16, "meta"), options)
    rejected = {record.name: " ".join(record.rejected) for record in compiled.records}
    assert "moe_route reads it" in rejected["smooth_channels"]
    sources = [str(recipe) for recipe in compiled.recipes.values()]
    assert any("rounded" in each for each in sources)
    assert not any("rounded" in each for each in sources if "experts" in each)
    program = compiled.program(Bucket(3, 3, 13, 4, decode=True, lora=False))
    assert "fuse_decoder_block: paged_attention_quant_1: its MLP is a mixture of experts" in program.passes


def test_multipliers_cost_no_kernel_in_a_layer() -> None:
    records = sidestream.compile(sparse_model("granite", True, torch.bfloat16, "meta")).records
    assert next(record for record in records if record.name == "fold_multipliers").matches == 2 + 1
    assert records[-1].ops_after["aten.mul.Tensor"] == 1  # the embedding's


@pytest.mark.parametrize("world", [1, 2])
def test_experts_stored_in_eight_bits_are_not_rounded_again(world: int) -> None:
    """A rank has its columns of gate and of up, and the scales of these."""
    model = sparse_model("mixtral", False, torch.bfloat16, weight_format="int8")
    compiled = sidestream.compile(model, CompileOptions(tensor_parallel=world, tensor_parallel_rank=world - 1))
    state = model.state_dict()
    for linear, halves, dim in (("gate_up_proj", 2, 1), ("down_proj", 1, 2)):
        name = f"model.layers.1.mlp.experts.{linear}.weight"
        values, scales = (
            materialize(recipe, state.__getitem__)
            for source in (name, f"{name}_scale")
            for recipe in compiled.recipes.values()
            if recipe.sources() == {source}
        )
        share = [half.chunk(world, dim)[-1] for half in state[name].chunk(halves, dim)]
        assert values.dtype == torch.int8 and torch.equal(values, torch.cat(share, dim))
        whole = state[f"{name}_scale"].squeeze(-1)
        rows = [half.chunk(world, 1)[-1] for half in whole.chunk(halves, 1)] if dim == 1 else [whole]
        assert torch.equal(scales, torch.cat(rows, 1))


def on_ranks(group: RankGroup) -> dict[str, torch.Tensor]:
    found = {}
    for precision, dtype in (("fp32", torch.float32), ("int8", torch.bfloat16)):
        options: Any = {"precision": precision, "tensor_parallel": 2, "tensor_parallel_rank": group.rank}
        model = sparse_model("mixtral", True, dtype)
        found[precision] = logits_of(model, CompileOptions(**options))
    return found


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    one, other = run_on_ranks(2, on_ranks, tmp_path)
    want = logits_of(sparse_model("mixtral"))
    assert all(torch.equal(one[precision], other[precision]) for precision in one), "ranks hold the same bits"
    torch.testing.assert_close(one["fp32"], want, atol=1e-4, rtol=0)
    assert 1e-9 < divergence(one["int8"], want) < 2e-2


def test_a_rank_has_its_columns_of_each_expert() -> None:
    options = CompileOptions(tensor_parallel=2, tensor_parallel_rank=1)
    compiled = sidestream.compile(sparse_model("mixtral", True, torch.bfloat16, "meta"), options)
    program = compiled.program(Bucket(3, 3, 13, 4, decode=True))
    shapes = {
        buffer.name.split("experts_")[1]: buffer.shape for buffer in program.buffers if "1_mlp_experts" in buffer.name
    }
    assert shapes["gate_up_proj_weight_int8"] == (EXPERTS, WIDTH, 128)
    assert shapes["down_proj_weight_int8"] == (EXPERTS, 128, WIDTH // 2)
    assert shapes["gate_up_proj_lora_a_int8"] == (3, EXPERTS, 2 * 32, 128)
    assert shapes["gate_up_proj_lora_b_int8"] == (3, EXPERTS, WIDTH, 32)
    assert shapes["down_proj_lora_a_int8"] == (3, EXPERTS, 32, WIDTH // 2)


def test_widths_that_ranks_cannot_share() -> None:
    with pytest.raises(OptionError, match="gives each rank 8 columns of each expert"):
        model = sparse_model("qwen3", False, torch.bfloat16, "meta", expert_intermediate_size=16)
        sidestream.compile(model, CompileOptions(tensor_parallel=2)).records  # noqa: B018


def test_dumps_and_estimates_show_experts(tmp_path: Path) -> None:
    compiled = sidestream.compile(sparse_model("mixtral", True, torch.bfloat16, "meta"))
    buckets = [Bucket(8, 8, 17, 2, decode=True), Bucket(96, 8, 17, 2)]
    text = compiled.explain(buckets)
    compiled.dump(tmp_path, buckets)
    assert all(name in (tmp_path / "passes.txt").read_text() for name in NEW_PASSES)
    assert all(name in (tmp_path / "index.html").read_text() for name in (*NEW_PASSES, "grouped_linear_8bit"))
    assert "grouped_linear_8bit" in text and "moe_route" in text
