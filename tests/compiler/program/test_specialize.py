"""Symbolic graphs at a bucket's sizes: shapes, folded integers, erased LoRA, decode flags, dead code."""

import operator
import time

import pytest
import torch
from sidestream.compiler.graph.nodes import op_name
from sidestream.compiler.pass_records import graph_lines, text_of
from sidestream.compiler.program.program import Bucket
from sidestream.compiler.program.sizes import SpecializeError, bucket_inputs
from sidestream.compiler.program.specialize import specialize
from sidestream.ops.core.registry import OPS
from sidestream.ops.linear import linear_8bit
from support.fx_graphs import GraphBuilder, static_inputs
from torch import fx

aten = torch.ops.aten
BF16, I32 = torch.bfloat16, torch.int32
H, R, S = 32, 16, 4


def calls(graph: fx.Graph) -> list[str]:
    return [
        op_name(node).removeprefix("sidestream.")
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]


def node_of(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.op == "call_function" and op_name(node) == name)


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "placeholder"]


def lora_model(join: str = "op") -> fx.GraphModule:
    """norm+quant -> linear, next to it LoRA on the kept activation; joined by add_rms_norm, or by a plain add."""
    build = GraphBuilder()
    x = build.input("input_ids", ("T",), torch.int64)
    adapter_index = build.input("adapter_index", ("T",), I32)
    rows = build.input("logits_indices", ("B",), I32)
    table, norm = build.weight("table", (16, H), BF16), build.weight("norm", (H,), BF16)
    weight, weight_scale = build.weight("weight", (H, H), torch.float8_e4m3fn), build.weight("weight_scale", (H,))
    a, b = build.weight("lora_a", (S, R, H), BF16, "adapter"), build.weight("lora_b", (S, H, R), BF16, "adapter")
    hidden = build.call(OPS["embedding"], x, table)
    normed = build.call(OPS["rms_norm_quant"], hidden, norm, 1e-5, True)
    kept, q, scale = (build.pick(normed, index) for index in range(3))
    y = build.call(linear_8bit.linear_8bit, q, scale, weight, weight_scale, None, None, BF16)
    plan = build.call(OPS["lora_plan"], adapter_index, S, 16, side=True)
    order, tiles = build.pick(plan, 0), build.pick(plan, 1)
    planes = build.call(OPS["lora_shrink"], kept, a, order, tiles, 16, 1, side=True)
    delta = build.call(OPS["lora_expand"], planes, b, order, tiles, 16, [H], side=True)
    if join == "op":
        out = build.pick(build.call(OPS["add_rms_norm"], y, hidden, delta, norm, 1e-5), 0)
    elif join == "add":
        out = build.call(
            aten.add.Tensor, y, build.call(aten.view.default, delta, [build.call(aten.sym_size.int, delta, 0), H])
        )
    else:
        out = build.call(aten.sub.Tensor, y, delta)
    return build.finish(build.call(aten.index_select.default, out, 0, rows))


def test_shapes_become_the_buckets() -> None:
    graph = specialize(lora_model(), Bucket(10, 3, 8, 2))
    shapes = {
        node.name: tuple(node.meta["val"].shape)
        for node in graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    assert (
        shapes["input_ids"] == (10,)
        and shapes["embedding_default"] == (10, H)
        and shapes["index_select_default"] == (3, H)
    )
    assert node_of(graph, "sidestream.lora_expand").meta["stream"] == "side"


def test_the_symbolic_graph_stays_as_it_was() -> None:
    module = lora_model()
    before = text_of(graph_lines(module))
    for bucket in (Bucket(3, 3, 8, 2, decode=True, lora=False), Bucket(10, 3, 8, 2)):
        specialize(module, bucket)
        assert text_of(graph_lines(module)) == before


def test_sizes_fold_and_views_stay_views() -> None:
    build = GraphBuilder()
    x = build.input("input_ids", ("T", 12))
    half = build.call(operator.floordiv, build.call(aten.sym_size.int, x, 0), 2)
    graph = specialize(build.finish(build.call(aten.view.default, x, [half, 2, 12])), Bucket(8, 2, 4, 2))
    assert calls(graph) == ["aten.view.default"]
    view = node_of(graph, "aten.view.default")
    assert view.args[1] == [4, 2, 12]
    assert view.meta["val"].untyped_storage()._cdata == next(iter(graph.nodes)).meta["val"].untyped_storage()._cdata


def test_without_lora_ops_take_none_and_nothing_is_kept_for_it() -> None:
    graph = specialize(lora_model(), Bucket(10, 3, 8, 2, lora=False))
    assert calls(graph) == ["embedding", "rms_norm_quant", "linear_8bit", "add_rms_norm", "aten.index_select.default"]
    assert node_of(graph, "sidestream.add_rms_norm").args[2] is None
    assert node_of(graph, "sidestream.rms_norm_quant").args[3] is False
    assert node_of(graph, "sidestream.rms_norm_quant").meta["val"][0].shape == (0, H)
    assert names(graph) == ["input_ids", "logits_indices", "table", "norm", "weight", "weight_scale"]


def test_without_lora_sums_vanish() -> None:
    graph = specialize(lora_model("add"), Bucket(10, 3, 8, 2, lora=False))
    assert calls(graph) == ["embedding", "rms_norm_quant", "linear_8bit", "aten.index_select.default"]


def test_a_delta_that_something_else_needs_is_named() -> None:
    with pytest.raises(SpecializeError, match=r"aten\.sub\.Tensor .* lora_expand"):
        specialize(lora_model("sub"), Bucket(10, 3, 8, 2, lora=False))


def test_lora_kernels_get_tiles_for_the_token_count() -> None:
    few, many = (specialize(lora_model(), Bucket(tokens, 2, 8, 2)) for tokens in (4, 4000))
    assert node_of(few, "sidestream.lora_plan").args[2] == 16 and node_of(many, "sidestream.lora_plan").args[2] == 64
    assert node_of(many, "sidestream.lora_shrink").args[4] == node_of(many, "sidestream.lora_expand").args[4] == 64


def test_decode_drops_the_selection_of_logits_rows() -> None:
    graph = specialize(lora_model(), Bucket(3, 3, 8, 2, decode=True))
    assert "aten.index_select.default" not in calls(graph) and "logits_indices" not in names(graph)


def test_decode_sets_attentions_flag() -> None:
    build = GraphBuilder()
    q = build.input("positions", ("T", 2, 64), BF16)
    cache = build.input("kv_caches_0", ("NP", 1, 2, 64, 64), BF16)
    block_table, lens, start = (
        build.input("block_table", ("B", "P"), I32),
        build.input("context_lens", ("B",), I32),
        build.input("query_start", ("B+1",), I32),
    )
    module = build.finish(
        build.call(OPS["paged_attention"], q, cache, None, block_table, lens, start, 0.1, False, False)
    )
    for decode in (True, False):
        graph = specialize(module, Bucket(3, 3, 20, 7, decode=decode))
        assert node_of(graph, "sidestream.paged_attention").args[-1] is decode
    specs = bucket_inputs(module, Bucket(30, 3, 20, 7))
    assert (
        specs["kv_caches_0"] == ((20, 1, 2, 64, 64), BF16)
        and specs["block_table"] == ((3, 7), I32)
        and specs["query_start"] == ((4,), I32)
    )


def test_dead_code_goes_mutations_stay() -> None:
    build = GraphBuilder()
    x, other = build.input("input_ids", ("T", 4)), build.input("other", ("T", 4))
    build.call(aten.relu.default, other)
    build.call(aten.copy_.default, x, build.call(aten.neg.default, x))
    graph = specialize(build.finish(build.call(aten.add.Tensor, x, 1)), Bucket(8, 2, 4, 2))
    assert calls(graph) == ["aten.neg.default", "aten.copy_.default", "aten.add.Tensor"]
    assert names(graph) == ["input_ids"]


def test_the_y_that_only_a_size_was_taken_of_is_not_kept() -> None:
    build = GraphBuilder()
    x = build.input("input_ids", ("T", H), BF16)
    normed = build.call(OPS["rms_norm_quant"], x, build.weight("norm", (H,), BF16), 1e-5, True)
    size = build.call(aten.sym_size.int, build.pick(normed, 0), 0)
    graph = specialize(
        build.finish(build.call(aten.view.default, build.pick(normed, 1), [size, 2, H // 2])), Bucket(8, 2, 4, 2)
    )
    assert node_of(graph, "sidestream.rms_norm_quant").args[3] is False
    assert node_of(graph, "aten.view.default").meta["val"].shape == (8, 2, H // 2)


def test_foreign_graphs_take_example_inputs() -> None:
    build = GraphBuilder(dynamic=False)
    x = build.input("hidden", (3, 6))
    n = build.graph.placeholder("n")
    n.meta.update(val=3, kind="input")
    module = build.finish(build.call(aten.view.default, build.call(aten.transpose.int, x, 0, 1), [6, n]))
    strided = torch.empty(6, 3).t()
    graph = specialize(module, {"hidden": strided, "n": 3})
    assert next(iter(graph.nodes)).meta["val"].stride() == strided.stride()
    assert names(graph) == ["hidden"]
    assert node_of(graph, "aten.view.default").args[1] == [6, 3]


def test_graphs_of_concrete_sizes_need_no_bucket() -> None:
    build = GraphBuilder(dynamic=False)
    module = build.finish(build.call(aten.relu.default, build.input("anything", (3, 5))))
    assert specialize(module, static_inputs(module)).find_nodes(op="output")


def test_devices_in_the_graph_do_not_matter() -> None:
    build = GraphBuilder()
    x = build.input("input_ids", ("T",))
    positions = build.call(
        aten.arange.default, build.call(aten.sym_size.int, x, 0), dtype=torch.float32, device=torch.device("cpu")
    )
    plain = build.call(aten.full.default, [1], 2.0)
    graph = specialize(
        build.finish(build.call(aten.add.Tensor, build.call(aten.add.Tensor, x, positions), plain)), Bucket(8, 2, 4, 2)
    )
    assert all(node.meta["val"].device.type == "meta" for node in graph.nodes if node.op == "call_function")


def test_errors_say_which_input_or_node() -> None:
    build = GraphBuilder()
    unknown = build.input("mystery", ("T",))
    with pytest.raises(SpecializeError, match="input mystery has the size"):
        specialize(build.finish(unknown), Bucket(8, 2, 4, 2))
    build = GraphBuilder(dynamic=False)
    fixed = build.finish(build.call(aten.relu.default, build.input("input_ids", ("T",))))
    with pytest.raises(SpecializeError, match="T = 24 in the graph, the bucket asks for 8"):
        specialize(fixed, Bucket(8, 2, 4, 2))
    with pytest.raises(SpecializeError, match="no size is given for input input_ids"):
        specialize(fixed, {})
    build = GraphBuilder()
    tokens, sequences = build.input("input_ids", ("T",)), build.input("context_lens", ("T",))
    with pytest.raises(SpecializeError, match="one symbol for T and B"):
        specialize(build.finish(build.call(aten.add.Tensor, tokens, sequences)), Bucket(8, 2, 4, 2))
    build = GraphBuilder()
    mismatch = build.finish(build.call(aten.view.default, build.input("input_ids", ("T",)), [-1, 4]))
    with pytest.raises(
        SpecializeError,
        match=r"view_default = aten\.view\.default\(\.\.\.\) fails at these sizes \(input_ids: \(6,\)\)",
    ):
        specialize(mismatch, Bucket(6, 2, 4, 2))


def test_four_times_the_nodes_take_four_times_as_long() -> None:
    def seconds(count: int) -> float:
        build = GraphBuilder()
        x = build.input("input_ids", ("T", H), BF16)
        norm = build.weight("norm", (H,), BF16)
        for _ in range(count):
            x = build.call(aten.add.Tensor, build.call(OPS["rms_norm"], x, norm, 1e-5), x)
        module = build.finish(x)

        def once() -> float:
            begin = time.process_time()
            specialize(module, Bucket(8, 2, 4, 2))
            return time.process_time() - begin

        return min(once() for _ in range(3))

    assert seconds(240) < 10 * seconds(60), "more than the nodes' number explains; by its square it were sixteen"
