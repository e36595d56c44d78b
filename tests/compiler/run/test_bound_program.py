"""Bound programs: the steps on the planned memory compute what the graph says, and what doesn't fit is refused."""

import json
import random
import threading
from typing import Any

import pytest
import torch
from sidestream.compiler.build_program import build_program
from sidestream.compiler.options import CompileOptions
from sidestream.compiler.program.buffers import ProgramError
from sidestream.compiler.program.calls import out_overload
from sidestream.compiler.program.program import Bucket, Program
from sidestream.compiler.run.bound_program import CPU_PRODUCTS, BoundProgram
from sidestream.ops.core.registry import OPS
from support.fx_graphs import GraphBuilder, random_tensors, static_inputs
from support.races import find_races
from support.two_lanes import reachable
from torch import fx

aten = torch.ops.aten
SIDE = CompileOptions(lora_lowering="side_stream")


def program_of(module: fx.GraphModule, options: CompileOptions = SIDE) -> Program:
    return build_program(module, static_inputs(module), options)


class Eager(fx.Interpreter):
    """Calls a graph's nodes, products in the order of sums that bound programs have on a CPU."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(CPU_PRODUCTS.get(str(target), target), args, kwargs)


def eager(module: fx.GraphModule, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """What the graph computes node by node, on copies of the tensors."""
    values = [
        tensors[node.name].clone() if node.name in tensors else torch.zeros(())
        for node in module.graph.nodes
        if node.op == "placeholder"
    ]
    result = Eager(module).run(*values)
    return list(result) if isinstance(result, tuple) else [result]


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual.float(), expected.float())


def two_lane_module() -> fx.GraphModule:
    build = GraphBuilder(dynamic=False)
    x, w = build.input("x", (6, 32)), build.weight("w", (32,))
    normed = build.call(OPS["rms_norm_quant"], x, w, 1e-5, True)
    kept, q, scale = (build.pick(normed, index) for index in range(3))
    base = build.call(
        aten.mul.Tensor, build.call(aten.to.dtype, q, torch.float32), build.call(aten.unsqueeze.default, scale, -1)
    )
    down = build.call(aten.mm.default, kept, build.weight("a", (32, 4), kind="adapter"), side=True)
    delta = build.call(aten.mm.default, down, build.weight("b", (4, 32), kind="adapter"), side=True)
    joined = build.call(OPS["add_rms_norm"], base, x, delta, w, 1e-5)
    gate = build.call(OPS["silu_mul"], build.pick(joined, 0), None)
    return build.finish(gate, build.pick(joined, 1), build.call(aten.view.default, delta, [-1]))


def test_a_two_lane_program_computes_what_the_graph_says() -> None:
    module = two_lane_module()
    program = program_of(module)
    assert any(step.waits for step in program.steps) and find_races(program) == []
    tensors = random_tensors(module, program.buffers)
    bound = BoundProgram(program, tensors, poison=True)
    first = [out.clone() for out in bound.run()]
    assert all(same(out, expected) for out, expected in zip(first, eager(module, tensors), strict=True))
    bound.poison()
    assert all(same(out, before) for out, before in zip(bound.replay(), first, strict=True))
    tensors["x"].normal_()
    assert all(same(out, expected) for out, expected in zip(bound.run(), eager(module, tensors), strict=True))


def random_module(rng: random.Random) -> fx.GraphModule:
    """Norms, sums, products and views on both lanes, with a cache that is written in place now and then."""
    build = GraphBuilder(dynamic=False)
    cache = build.input("cache", (8, 16))
    values = [build.input("x", (8, 16)), build.input("y", (8, 16))]
    weight = build.weight("w", (16,))
    for _ in range(24):
        side = rng.random() < 0.4
        a, b = rng.choice(values), rng.choice(values)
        kind = rng.choice(["norm", "add", "quant", "view", "write", "read", "sum"])
        if kind == "norm":
            values.append(build.call(OPS["rms_norm"], a, weight, 1e-5, side=side))
        elif kind == "add":
            values.append(build.call(aten.add.Tensor, a, b, side=side, alpha=0.5))
        elif kind == "quant":
            both = build.call(OPS["quantize_rowwise"], a, side=side)
            q, scale = build.pick(both, 0), build.pick(both, 1)
            wide = build.call(aten.to.dtype, q, torch.float32, side=side)
            values.append(build.call(aten.mul.Tensor, wide, build.call(aten.unsqueeze.default, scale, 1), side=side))
        elif kind == "view":
            values.append(
                build.call(
                    aten.flip.default,
                    build.call(aten.view.default, build.call(aten.view.default, a, [16, 8]), [8, 16]),
                    [0],
                    side=side,
                )
            )
        elif kind == "write":
            build.call(
                aten.copy_.default,
                build.call(aten.slice.Tensor, cache, 0, 2, 6),
                build.call(aten.slice.Tensor, a, 0, 0, 4),
                side=side,
            )
        elif kind == "read":
            values.append(build.call(aten.add.Tensor, cache, a, side=side))
        else:
            values.append(
                build.call(aten.sub.Tensor, a, build.call(aten.mean.dim, b, [-1], True, side=side), side=side)
            )
        if len(values) > 6:
            values.pop(rng.randrange(len(values)))
    return build.finish(*values[-3:], build.call(aten.clone.default, cache))


@pytest.mark.parametrize("seed", range(12))
def test_any_order_that_the_waits_allow_gives_the_same_result(seed: int) -> None:
    """Two streams, simulated: the steps run in random interleavings of the lanes, on memory full of NaN."""
    rng = random.Random(seed)
    module = random_module(rng)
    program = program_of(module)
    assert find_races(program) == []
    tensors = random_tensors(module, program.buffers)
    expected = eager(module, tensors)
    before = reachable(program.steps)
    for _ in range(4):
        bound = BoundProgram(program, {name: tensor.clone() for name, tensor in tensors.items()}, poison=True)
        left, done = list(range(len(program.steps))), set()
        while left:
            chosen = rng.choice([index for index in left if before[index] <= done])
            bound.run_step(chosen)
            left.remove(chosen)
            done.add(chosen)
        assert all(same(out, value) for out, value in zip(bound.outputs, expected, strict=True))


def test_mutations_reach_the_callers_tensors() -> None:
    build = GraphBuilder(dynamic=False)
    k, cache, slots = (
        build.input("k", (3, 1, 64)),
        build.input("cache", (2, 1, 2, 64, 64)),
        build.input("slots", (3,), torch.int32),
    )
    build.call(OPS["append_kv"], k, k, cache, None, slots)
    module = build.finish(build.call(aten.add.Tensor, k, 1))
    program = program_of(module)
    tensors = {
        "k": torch.randn(3, 1, 64),
        "cache": torch.zeros(2, 1, 2, 64, 64),
        "slots": torch.tensor([0, 65, -1], dtype=torch.int32),
    }
    BoundProgram(program, tensors).run()
    assert torch.equal(tensors["cache"][0, 0, 0, 0], tensors["k"][0, 0]) and torch.equal(
        tensors["cache"][1, 0, 1, 1], tensors["k"][1, 0]
    )
    assert tensors["cache"].count_nonzero() == 4 * 64


def test_views_inputs_and_plain_values_can_be_returned() -> None:
    build = GraphBuilder(dynamic=False)
    x = build.input("x", (4, 6))
    doubled = build.call(aten.add.Tensor, x, x)
    size, row = build.call(aten.sym_size.int, x, 0), build.call(aten.select.int, doubled, 0, 2)
    module = build.finish(build.call(aten.transpose.int, doubled, 0, 1), x, None, size, row)
    program = program_of(module)
    assert [step.op for step in program.steps] == ["aten.add.Tensor"] and not program.single_output
    tensors = {"x": torch.randn(4, 6)}
    outputs = BoundProgram(program, tensors).run()
    assert (
        torch.equal(outputs[0], tensors["x"].t() * 2)
        and outputs[1].data_ptr() == tensors["x"].data_ptr()
        and outputs[2:4] == (None, 4)
    )
    assert torch.equal(outputs[4], tensors["x"][2] * 2)
    single = GraphBuilder(dynamic=False)
    assert program_of(single.finish(single.call(aten.relu.default, single.input("x", (4, 6))))).single_output


def test_strided_results_foreign_factories_and_pieces_of_one_storage() -> None:
    build = GraphBuilder(dynamic=False)
    x = build.input("x", (4, 6))
    turned = build.call(aten.add.Tensor, build.call(aten.transpose.int, x, 0, 1), 1)  # keeps the transposed strides
    steps = build.call(aten.arange.default, 6, dtype=torch.float32, device=torch.device("cpu"))
    left = build.pick(build.call(aten.split.Tensor, build.call(aten.add.Tensor, x, steps), 3, 1), 1)
    copied = build.call(aten.reshape.default, build.call(aten.transpose.int, left, 0, 1), [12])
    module = build.finish(turned, copied, build.pick(build.call(aten.topk.default, x, 2), 0))
    program = program_of(module)
    tensors = {"x": torch.randn(4, 6)}
    bound = BoundProgram(program, tensors, poison=True)
    assert all(same(out, expected) for out, expected in zip(bound.run(), eager(module, tensors), strict=True))
    assert bound.outputs[0].stride() == (1, 6)


def test_steps_can_be_watched_and_timed() -> None:
    module = two_lane_module()
    program = program_of(module)
    bound = BoundProgram(program, random_tensors(module, program.buffers))
    seen: list[str] = []
    bound.run(synchronize=True, on_step=lambda step, outs: seen.append(f"{step.name}:{len(outs)}"))
    assert seen == [f"{step.name}:{len(step.outs)}" for step in program.steps]
    times = bound.step_times(2)
    assert len(times) == len(program.steps) and all(seconds > 0 for seconds in times)
    assert bound.capture() is bound and not bound.captured and bound.pool is None


def test_programs_may_share_an_arena() -> None:
    module = two_lane_module()
    program = program_of(module)
    tensors = random_tensors(module, program.buffers)
    arena = torch.full((program.arena_bytes + 1024,), 0xFF, dtype=torch.uint8)
    first, second = (BoundProgram(program, tensors, arena=arena) for _ in range(2))
    expected = eager(module, tensors)
    assert all(same(a, e) and same(b, e) for a, b, e in zip(first.run(), second.run(), expected, strict=True))
    with pytest.raises(ProgramError, match="at least 2816 bytes"):
        BoundProgram(program, tensors, arena=arena[: program.arena_bytes - 1])


def test_the_caller_may_give_the_output_tensor() -> None:
    build = GraphBuilder(dynamic=False)
    program = program_of(build.finish(build.call(aten.relu.default, build.input("x", (4, 6)))))
    out = torch.full((4, 6), torch.nan)
    (name,) = [buffer.name for buffer in program.of_kind("output")]
    (result,) = BoundProgram(program, {"x": torch.randn(4, 6), name: out}).run()
    assert result.data_ptr() == out.data_ptr() and not out.isnan().any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("w"), "no tensor is given for the weight 'w'"),
        (lambda t: t.update(x=torch.randn(5, 32)), r"input 'x' must be torch.float32 \[6, 32\]"),
        (lambda t: t.update(x=torch.randn(6, 32).bfloat16()), "got torch.bfloat16"),
        (lambda t: t.update(x=torch.randn(32, 6).t()), "pass a contiguous tensor"),
        (lambda t: t.update(a=torch.empty(32, 4, device="meta")), "on meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: Any, says: str) -> None:
    module = two_lane_module()
    program = program_of(module)
    tensors = random_tensors(module, program.buffers)
    change(tensors)
    with pytest.raises(ProgramError, match=says):
        BoundProgram(program, tensors, "cpu")


def test_unknown_ops_are_named() -> None:
    build = GraphBuilder(dynamic=False)
    program = program_of(build.finish(build.call(aten.relu.default, build.input("x", (4, 6)))))
    for op, says in (("sidestream.gone", "does not exist in this release"), ("aten.gone.default", "which this torch")):
        data = program.to_json()
        data["steps"][0]["op"] = op
        with pytest.raises(ProgramError, match=says):
            BoundProgram(Program.decoded(json.dumps(data).encode()), {"x": torch.randn(4, 6)})


def test_out_variants_take_what_the_op_takes() -> None:
    assert out_overload("aten.add.Tensor") == (aten.add.out, ("out",))
    assert out_overload("aten.mean.dim") == (aten.mean.out, ("out",))
    assert out_overload("aten.topk.default") == (aten.topk.values, ("values", "indices"))
    assert out_overload("aten.reshape.default") is None


def test_lora_free_twin_equals_adapter_minus_one() -> None:
    """A decode program with LoRA and no active adapter computes what its twin without LoRA does."""
    build = GraphBuilder()
    x, adapter_index = build.input("input_ids", ("T",), torch.int64), build.input("adapter_index", ("T",), torch.int32)
    rows = build.input("logits_indices", ("B",), torch.int32)
    norm = build.weight("norm", (32,))
    hidden = build.call(OPS["embedding"], x, build.weight("table", (16, 32)))
    kept = build.pick(build.call(OPS["rms_norm_quant"], hidden, norm, 1e-5, True), 0)
    base = build.call(aten.mul.Tensor, hidden, 3.0)
    a, b = build.weight("a", (2, 16, 32), kind="adapter"), build.weight("b", (2, 32, 16), kind="adapter")
    delta = build.call(OPS["lora"], kept, a, b, adapter_index, [32], side=True)
    out = build.pick(build.call(OPS["add_rms_norm"], base, hidden, delta, norm, 1e-5), 0)
    module = build.finish(build.call(aten.index_select.default, out, 0, rows))
    with_lora, without = (build_program(module, Bucket(4, 4, 8, 2, decode=True, lora=lora)) for lora in (True, False))
    assert {step.stream for step in with_lora.steps} == {"main", "side"} and {
        step.stream for step in without.steps
    } == {"main"}
    assert not without.of_kind("adapter")
    tensors = random_tensors(module, with_lora.buffers)
    tensors["adapter_index"].fill_(-1)
    assert torch.equal(
        BoundProgram(with_lora, tensors, poison=True).run()[0], BoundProgram(without, tensors, poison=True).run()[0]
    )


@pytest.mark.gpu
def test_replay_equals_the_steps_run_one_by_one() -> None:
    build = GraphBuilder(dynamic=False)
    x, w = build.input("x", (16, 256), torch.bfloat16), build.weight("w", (256,), torch.bfloat16)
    kept = build.pick(build.call(OPS["rms_norm_quant"], x, w, 1e-5, True), 0)
    base = build.call(OPS["add_rms_norm"], kept, x, None, w, 1e-5)
    down = build.call(aten.mm.default, kept, build.weight("a", (256, 16), torch.bfloat16), side=True)
    delta = build.call(aten.mm.default, down, build.weight("b", (16, 256), torch.bfloat16), side=True)
    module = build.finish(
        build.pick(build.call(OPS["add_rms_norm"], build.pick(base, 0), build.pick(base, 1), delta, w, 1e-5), 0)
    )
    program = program_of(module)
    tensors = {name: tensor.cuda() for name, tensor in random_tensors(module, program.buffers).items()}
    bound = BoundProgram(program, tensors, poison=True)
    expected = bound.run(synchronize=True)[0].clone()
    bound.capture()
    for _ in range(20):
        bound.poison()
        result = bound.replay()[0]
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
    tensors["x"].normal_()
    replayed = bound.replay()[0].clone()
    assert torch.equal(replayed, bound.run(synchronize=True)[0]) and not torch.equal(replayed, expected)


@pytest.mark.gpu
def test_a_capture_and_another_threads_wait_for_a_step_leave_each_other_alone() -> None:
    build = GraphBuilder(dynamic=False)
    x, w = build.input("x", (16, 256), torch.bfloat16), build.weight("w", (256,), torch.bfloat16)
    module = build.finish(build.pick(build.call(OPS["rms_norm_quant"], x, w, 1e-5, True), 0))
    program = program_of(module)
    tensors = {name: tensor.cuda() for name, tensor in random_tensors(module, program.buffers).items()}
    expected = BoundProgram(program, tensors).run(synchronize=True)[0].clone()
    over, refused = threading.Event(), list[Exception]()

    def wait_for_steps() -> None:
        stream = torch.cuda.Stream()
        while not over.is_set():
            with torch.cuda.stream(stream):
                event = torch.cuda.Event()
                event.record()
            try:
                event.synchronize()
            except RuntimeError as problem:
                refused.append(problem)
                return

    waiting = threading.Thread(target=wait_for_steps)
    waiting.start()
    try:
        captured = [BoundProgram(program, tensors).capture() for _ in range(50)]
    finally:
        over.set()
        waiting.join()
    assert not refused
    assert all(same(bound.replay()[0], expected) for bound in captured)
