"""int8 holds the residual stream of a bf16 model in fp16: finer, in as many bytes."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.api import CompiledModel
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes.base import Context
from sidestream.compiler.passes.quantize.finer_residual import finer_residual
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from sidestream.ops.elementwise.embedding import embedding
from sidestream.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from support.compiled import CompiledRunner
from support.families import FAMILIES, tiny_family
from support.fx_graphs import GraphBuilder
from support.meta import FIELDS, compiled_without_weights
from support.paged import Chunk, plain_model
from support.tiny import TinyBase, tiny_llama
from torch import fx

BF16, FP16 = torch.bfloat16, torch.float16
CHUNKS = [Chunk(0, list(range(3, 33)), -1), Chunk(1, [7, 200, 31, 99, 4], -1)]
LAYERS, LARGE = 6, 1024.0  # layers; what the embedding is multiplied by, so that the stream is large next to their sums
DECODE = Bucket(4, 4, 8, 2, decode=True, lora=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("finer"), dtype=BF16, num_hidden_layers=LAYERS)


def logits(base: TinyBase, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    model, _ = plain_model(base, dtype=dtype)
    model.model.embed_tokens.weight.mul_(LARGE)
    torch.manual_seed(0)
    return torch.cat(CompiledRunner(model, CompileOptions(**options), 2, fill=0.0).step(CHUNKS))


def record(compiled: CompiledModel) -> tuple[int, str]:
    """Matches of the pass, and what it refused."""
    found = next(each for each in compiled.records if each.name == "finer_residual")
    return found.matches, " ".join(found.rejected)


def dtypes_of(program: Program, op: str, argument: int, result: int) -> set[tuple[Any, Any]]:
    """Of an argument and of a result of each step with this op."""
    steps = [step for step in program.steps if step.op == f"sidestream.{op}"]
    names = [(step.args[argument].buffer, step.outs[result].buffer) for step in steps]
    return {(program.by_name[first].dtype, program.by_name[second].dtype) for first, second in names}


def test_logits_are_nearer_to_those_of_fp32(base: TinyBase) -> None:
    want = logits(base, torch.float32, precision="fp32")
    int8 = {"precision": "int8", "lm_head": "bf16"}
    fine, coarse = (
        float((logits(base, BF16, **int8, finer_residual=on) - want).norm() / want.norm()) for on in (True, False)
    )
    assert fine < 0.6 * coarse, (fine, coarse)


def test_by_name_by_option_and_in_other_modes_it_is_off() -> None:
    for options, matches in (
        ({"precision": "int8"}, 1),
        ({"precision": "int8", "finer_residual": False}, 0),
        ({"precision": "fp8"}, 0),
        ({"precision": "bf16"}, 0),
    ):
        compiled = compiled_without_weights(FIELDS, None, CompileOptions(**options))
        assert record(compiled) == (matches, ""), options
        program = compiled.program(DECODE)
        stream = FP16 if matches else BF16
        place = ("add_rms_norm", 1, 1) if options["precision"] == "bf16" else ("add_rms_norm_quant", 1, 3)
        assert dtypes_of(program, *place) == {(stream, stream)}
    off = compiled_without_weights(FIELDS, None, CompileOptions(precision="int8", disable=("finer_residual",)))
    assert "finer_residual" not in [each.name for each in off.records]
    assert dtypes_of(off.program(DECODE), "add_rms_norm_quant", 1, 3) == {(BF16, BF16)}


def test_it_costs_neither_bytes_nor_launches() -> None:
    for lora in (None, LoraShape(2, 16)):
        fine, coarse = (
            compiled_without_weights(FIELDS, lora, CompileOptions(precision="int8", finer_residual=on))
            for on in (True, False)
        )
        for bucket in (DECODE, Bucket(32, 4, 8, 2, lora=lora is not None)):
            programs = [compiled.program(bucket) for compiled in (fine, coarse)]
            assert len({each.arena_bytes for each in programs}) == 1
            assert len({tuple(step.op for step in each.steps) for each in programs}) == 1


def test_a_layer_in_one_launch_keeps_the_stream_so() -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 1}
    fields = {**FIELDS, **sizes, "head_dim": 128, "num_hidden_layers": 2}
    program = compiled_without_weights(fields, None, CompileOptions(precision="int8", whole_layer="on")).program(DECODE)
    assert [step.op for step in program.steps].count("sidestream.decoder_block") == 2
    assert dtypes_of(program, "decoder_block", 2, 1) == {(FP16, FP16)}
    assert (FP16, BF16) in dtypes_of(program, "decoder_block", 2, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_one_stream(name: str, tmp_path: Path) -> None:
    config = LlamaConfig.from_directory(tiny_family(tmp_path, name, random.Random(name)).path)
    compiled = sidestream.compile(Llama(config, None, BF16, "meta"), CompileOptions(precision="int8"), text=False)
    assert record(compiled) == (1, "")


def test_a_rank_of_several_has_it_too() -> None:
    fields = {**FIELDS, "num_attention_heads": 4, "num_key_value_heads": 2}
    compiled = compiled_without_weights(fields, None, CompileOptions(precision="int8", tensor_parallel=2))
    assert record(compiled) == (1, "")
    assert dtypes_of(compiled.program(DECODE), "all_reduce_add_rms_norm_quant", 1, 3) == {(FP16, FP16)}


def test_hidden_states_that_a_draft_reads_are_in_bf16(base: TinyBase) -> None:
    """Each of the stream's values, as the module itself returns them."""
    plain, _ = plain_model(base, dtype=BF16)
    model = Llama(plain.config, None, BF16, features=(1, 3, LAYERS))
    model.load_state_dict(plain.state_dict())
    torch.manual_seed(0)
    runner = CompiledRunner(model, CompileOptions(precision="int8"), 2, fill=0.0)
    assert record(runner.compiled) == (1, "")
    inputs = runner.inputs(CHUNKS)
    got = runner.compiled(**inputs, **runner.extra)
    with torch.no_grad():
        want = model(**{**inputs, "kv_caches": [cache.bfloat16() * 0 for cache in runner.kv_caches]})
    for feature, right in zip(got[1:], want[1:], strict=True):
        assert feature.dtype == BF16 and float((feature.float() - right.float()).norm() / right.float().norm()) < 0.1


def test_a_stream_that_something_else_reads_stays_whole() -> None:
    lines = {
        "fuse_add_rms_norm": "embedding_1: add_3 (aten.add.Tensor) reads it",
        "lift_rms_norm": "reads it",
        "lift_embedding": "",
    }
    for name, said in lines.items():
        options = CompileOptions(precision="int8", disable=(name,), check_counts=False)
        matches, rejected = record(compiled_without_weights(FIELDS, None, options))
        assert matches == 0 and said in rejected and bool(said) == bool(rejected), (name, rejected)
    whole = compiled_without_weights(FIELDS, None, CompileOptions(precision="int8"), torch.float32)
    assert record(whole) == (0, "embedding_1: the stream is torch.float32, not torch.bfloat16")


Build = Callable[[GraphBuilder, fx.Node, fx.Node, fx.Node], Any]


def by_hand(build: Build, dtype: torch.dtype = BF16) -> tuple[int, list[str], fx.Graph]:
    """What the pass makes of a graph of an embedding x, an update and a norm's weight."""
    graph = GraphBuilder(dynamic=False)
    ids, update = graph.input("input_ids", (3,), torch.int64), graph.input("update", (3, 32), BF16)
    table, gain = graph.weight("table", (16, 32), BF16), graph.weight("gain", (32,), dtype)
    x = graph.call(embedding, ids, table)
    module = graph.finish(*build(graph, x, update, gain))
    report = finer_residual(module.graph, Context(CompileOptions(precision="int8")))
    module.graph.lint()
    return report.matches, report.rejected, module.graph


def test_it_is_found_on_either_side_of_a_sum() -> None:
    def build(graph: GraphBuilder, x: fx.Node, update: fx.Node, gain: fx.Node) -> Any:
        y = graph.call(rms_norm, x, gain, 1e-5)
        normed = graph.call(add_rms_norm, x, update, None, gain, 1e-5)
        return y, graph.pick(normed, 0), graph.pick(normed, 1)

    matches, rejected, graph = by_hand(build)
    assert matches == 1 and not rejected
    values = torch.tensor([3, 0, 5]), torch.randn(3, 32).bfloat16(), 30 * torch.randn(16, 32).bfloat16()
    gain = torch.randn(32).bfloat16()
    first, second, new = fx.Interpreter(fx.GraphModule({}, graph)).run(*values, gain)
    ids, update, table = values
    total = table[ids].float() + update.float()
    assert torch.equal(first, rms_norm(table[ids], gain, 1e-5)) and second.dtype == new.dtype == BF16
    assert torch.equal(new, ((total / 16).half().float() * 16).bfloat16())


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda g, x, u, w: [g.call(rms_norm, x, w, 1e-5)], "nothing is added to it before a norm"),
        (
            lambda g, x, u, w: [g.pick(g.call(add_rms_norm, x, x, None, w, 1e-5), 0)],
            "add_rms_norm_default reads it as x and residual",
        ),
        (
            lambda g, x, u, w: [g.pick(g.call(add_rms_norm, u, u, x, w, 1e-5), 0)],
            "add_rms_norm_default reads it as delta",
        ),
        (
            lambda g, x, u, w: [
                g.call(torch.ops.aten.mean.dim, g.pick(g.call(add_rms_norm, u, x, None, w, 1e-5), 1), [-1])
            ],
            "mean_dim (aten.mean.dim) reads it",
        ),
    ],
    ids=["no sum", "twice", "delta", "pooled"],
)
def test_near_misses_are_refused_with_the_reason(build: Build, said: str) -> None:
    matches, rejected, graph = by_hand(build)
    assert matches == 0 and rejected == [f"embedding_default: {said}"]
    assert all(value.dtype != FP16 for node in graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor))


def test_weights_of_another_dtype_are_refused() -> None:
    matches, rejected, _ = by_hand(
        lambda g, x, u, w: [g.pick(g.call(add_rms_norm, u, x, None, w, 1e-5), 0)], torch.float32
    )
    reason = "embedding_default: the weight of add_rms_norm_default is torch.float32, not torch.bfloat16"
    assert (matches, rejected) == (0, [reason])
