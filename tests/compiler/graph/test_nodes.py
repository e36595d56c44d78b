"""Operands by name: what is given, defaults, replacement in place, and names that an op lacks."""

import operator

import pytest
import torch
from sidestream.compiler.graph.nodes import (
    aten,
    bind,
    erase_unused,
    has_operand,
    insert_call,
    is_pick,
    picks_of,
    replace_picks,
    set_operands,
    shared_values,
)
from sidestream.ops.elementwise.quantize import quantize_rowwise
from sidestream.ops.elementwise.rms_norm import add_rms_norm, add_rms_norm_quant
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


def add_norm(graph: fx.Graph) -> fx.Node:
    x, residual, weight = (graph.placeholder(name) for name in ("x", "residual", "weight"))
    return graph.call_function(add_rms_norm.overload, (x, residual, None, weight), {"eps": 1e-5})


def test_operands_have_the_names_of_the_schema() -> None:
    norm = add_norm(fx.Graph())
    bound = bind(norm)
    assert (bound.residual.name, bound.delta, bound.weight.name, bound.eps) == ("residual", None, "weight", 1e-5)
    assert bound.names_of(norm.args[1]) == ["residual"]  # type: ignore[arg-type]
    assert has_operand(norm, "delta") and not has_operand(norm, "keep")


def test_what_is_not_given_is_the_default() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert bind(graph.call_function(quantize_rowwise.overload, (x,))).dtype == torch.float8_e4m3fn
    cut = bind(graph.call_function(aten.slice.Tensor, (x, -1)))
    assert (cut.self, cut.dim, cut.start, cut.end, cut.step) == (x, -1, None, None, 1)


def test_operands_are_replaced_where_they_stand() -> None:
    graph = fx.Graph()
    norm = add_norm(graph)
    other = graph.placeholder("other")
    set_operands(norm, residual=other, eps=1e-6)
    assert norm.args[1] is other and dict(norm.kwargs) == {"eps": 1e-6} and norm in other.users
    rounded = graph.call_function(quantize_rowwise.overload, (other,))
    set_operands(rounded, rotate=8)
    assert rounded.args == (other, torch.float8_e4m3fn, 8)
    total = graph.call_function(aten.add.Tensor, (other, other))
    set_operands(total, alpha=2)
    assert len(total.args) == 2 and dict(total.kwargs) == {"alpha": 2}


def test_a_name_that_the_op_lacks_is_told_with_those_it_has() -> None:
    norm = add_norm(fx.Graph())
    with pytest.raises(
        AttributeError, match=r"add_rms_norm \(add_rms_norm.*no argument 'keep'; it has x, residual, delta"
    ):
        _ = bind(norm).keep
    with pytest.raises(AttributeError, match="no argument 'keep'"):
        set_operands(norm, keep=True)
    with pytest.raises(AttributeError, match="has no value for its argument 'eps'"):
        _ = bind(norm.graph.call_function(add_rms_norm.overload, norm.args)).eps


def test_picks_of_results() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    norm = graph.call_function(add_rms_norm_quant.overload, (x, x, None, x, 1e-5, False))
    first, last = (graph.call_function(operator.getitem, (norm, place)) for place in (0, 3))
    reader = graph.call_function(aten.add.Tensor, (first, last))
    assert picks_of(norm) == [(0, first), (3, last)] and is_pick(last, norm, 3) and not is_pick(last, norm, 0)
    replace_picks(norm, {3: x})
    assert reader.args == (first, x)


def test_what_nothing_reads_goes_and_what_writes_stays() -> None:
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    first = graph.call_function(aten.neg.default, (x,))
    graph.call_function(aten.neg.default, (first,))
    written = graph.call_function(aten.copy_.default, (x, other))
    read = graph.call_function(aten.neg.default, (x,))
    graph.output(read)
    erase_unused(graph)
    assert [node for node in graph.nodes if node.op != "output"] == [x, other, written, read]


def test_calls_share_a_value_only_if_their_inputs_are_equal() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        for name, shape, dtype in (
            ("x", (4, 8), torch.int32),
            ("y", (4, 8), torch.int32),
            ("z", (8,), torch.int32),
            ("wide", (4, 8), torch.int64),
        ):
            graph.placeholder(name).meta["val"] = torch.empty(shape, dtype=dtype)
    x, y, z, wide = graph.nodes

    def add(*args: object) -> torch.Tensor:
        return insert_call(graph, aten.add.Tensor, args).meta["val"]

    assert add(x, y) is not add(x, y), "only within passes"
    with shared_values({}):
        assert add(x, y) is add(y, x)
        results = [add(x, y), add(x, z), add(z, z), add(x, wide), add(x, 1), add(x, 1.0), add(x, True)]
        turned = insert_call(graph, aten.transpose.int, (x, 0, 1))
        assert add(turned, turned).shape == (8, 4)
    assert len({*map(id, results)}) == len(results)
    narrow, long = torch.int32, torch.int64
    assert [each.dtype for each in results] == [narrow, narrow, narrow, long, narrow, torch.float32, narrow]
    assert [each.dim() for each in results] == [2, 2, 1, 2, 2, 2, 2]
