"""`fuse_all_reduce_norm`: sums over the ranks move into the norms that read them."""

from collections import Counter
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.api import CompiledModel
from sidestream.compiler.cost.estimate import step_costs
from sidestream.compiler.cost.kernel_resources import launched_kernels
from sidestream.compiler.graph.nodes import aten, bind, is_call
from sidestream.compiler.inspect.explain import explain_program
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.passes.base import Context
from sidestream.compiler.passes.parallel.fuse_all_reduce_norm import fuse_all_reduce_norm
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.graphs.lora import LoraShape
from sidestream.ops.collectives.all_reduce import all_reduce
from sidestream.ops.collectives.all_reduce_add_rms_norm_quant import all_reduce_add_rms_norm_quant
from sidestream.ops.collectives.tensor_parallel_group import RankGroup, register_group
from sidestream.ops.elementwise.rms_norm import add_rms_norm_quant
from support.fx_graphs import GraphBuilder
from support.meta import FIELDS
from torch import fx

LAYERS, FUSED = 2, "sidestream.all_reduce_add_rms_norm_quant"
DECODE, PROMPT = Bucket(4, 4, 8, 2, decode=True), Bucket(32, 4, 8, 2)
F32 = torch.float32


def compiled(**options: Any) -> CompiledModel:
    fields = {**FIELDS, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    model = Llama(LlamaConfig.from_dict(fields), LoraShape(3, 16), torch.bfloat16, "meta")
    return sidestream.compile(model, CompileOptions(tensor_parallel=2, **options), text=False)


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return compiled()


def named(program: Program, op: str, name: str) -> list[Any]:
    place = [argument.name for argument in all_reduce_add_rms_norm_quant.overload._schema.arguments].index(name)
    return [step.args[place] for step in program.steps if step.op == op]


def test_every_sum_of_a_decode_step_is_part_of_a_norm(model: CompiledModel) -> None:
    record = next(each for each in model.records if each.name == "fuse_all_reduce_norm")
    assert record.matches == 2 * LAYERS - 1
    assert record.rejected == ["all_reduce_3: add_rms_norm_3 is not a quantizing norm"]
    decode, prompt = model.program(DECODE), model.program(PROMPT)
    counts = Counter(step.op for step in decode.steps)
    assert counts[FUSED] == 2 * LAYERS and not counts["sidestream.all_reduce"] and not counts["aten.add.Tensor"]
    assert all(step.waits for step in decode.steps if step.op == FUSED), "each waits for its LoRA delta"
    assert named(decode, FUSED, "spread") == [True] * 4, "nobody else reads the residual"
    assert named(prompt, FUSED, "spread") == [True, True, False], "the last norm reads all its rows"
    twin = model.program(Bucket(4, 4, 8, 2, decode=True, lora=False))
    assert named(twin, FUSED, "delta") == [None] * 4


def test_its_cost_is_what_comes_over_nvlink(model: CompiledModel) -> None:
    hidden = FIELDS["hidden_size"]
    for bucket, part in ((DECODE, 4 * hidden * 2), (Bucket(32768, 4, 512, 128), 32768 * hidden * 2)):
        program = model.program(bucket)
        costs = dict(zip(((step.op, step.name) for step in program.steps), step_costs(program), strict=True))
        first = costs[FUSED, "all_reduce_add_rms_norm_quant"]
        # all of the peer's rows; or half of them, and of what it makes of the other half one byte a column
        assert first.work.link_bytes == (part if bucket is DECODE else part // 2 + part // 4)
        assert first.floor >= first.work.link_bytes / 394e9 and first.seconds > first.floor
    assert first.bound == "NVLink"
    shown = {row["op"]: row for row in explain_program(program)["ops"]}
    assert shown[FUSED]["link_bytes"] == sum(cost.work.link_bytes for (op, _), cost in costs.items() if op == FUSED)
    assert all(not row["link_bytes"] for op, row in shown.items() if "all_" not in op)


def test_the_kernel_of_its_step_is_known(model: CompiledModel) -> None:
    program = model.program(DECODE)
    (kernels,) = launched_kernels([program]).values()
    for step, names in zip(program.steps, kernels, strict=True):
        if step.op == FUSED:
            assert names == ["ops.collectives.all_reduce_add_rms_norm_quant._kernel"]


def test_switched_off_by_name_the_sums_stand_alone() -> None:
    counts = Counter(step.op for step in compiled(disable=("fuse_all_reduce_norm",)).program(DECODE).steps)
    assert counts["sidestream.all_reduce"] == counts["sidestream.add_rms_norm_quant"] == 2 * LAYERS


def graph(*, sums_read_twice: bool = False, delta: bool = False) -> fx.GraphModule:
    """(q, scale, new residual[, sum]) of x0 + x1 of a rank, its residual and a norm, all fp32."""
    build = GraphBuilder(dynamic=False)
    x0, x1, residual, other = (build.input(name, (3, 16), F32) for name in ("x0", "x1", "residual", "other"))
    weight = build.weight("weight", (16,))
    total = build.call(all_reduce, build.call(aten.add.Tensor, x0, x1), "tp1")
    norm = build.call(add_rms_norm_quant, residual, total, other if delta else None, weight, 1e-5, False, torch.int8)
    picks = [build.call(torch.ops.aten.clone.default, build.pick(norm, place)) for place in (1, 2, 3)]
    return build.finish(*picks, *([total] if sums_read_twice else []))


def test_the_numbers_stay() -> None:
    register_group(RankGroup("tp1", 0, 1))
    module = graph()
    values = [torch.randn(3, 16) for _ in range(4)] + [torch.randn(16)]
    before = fx.Interpreter(module).run(*values)
    assert fuse_all_reduce_norm(module.graph, Context(CompileOptions())).matches == 1
    module.graph.eliminate_dead_code()
    (fused,) = (node for node in module.graph.nodes if is_call(node, all_reduce_add_rms_norm_quant))
    assert (bind(fused).partial.name, bind(fused).delta.name, bind(fused).residual.name) == ("x0", "x1", "residual")
    assert not bind(fused).spread, "the graph returns the residual"
    after = fx.Interpreter(module).run(*values)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"sums_read_twice": True}, "all_reduce_default: its sum is read by add_rms_norm_quant_default, output"),
        ({"delta": True}, "all_reduce_default: add_rms_norm_quant_default adds other, which is not a partial result"),
    ],
)
def test_near_misses_are_left(form: dict[str, bool], reason: str) -> None:
    report = fuse_all_reduce_norm(graph(**form).graph, Context(CompileOptions()))
    assert (report.matches, report.rejected) == (0, [reason])
