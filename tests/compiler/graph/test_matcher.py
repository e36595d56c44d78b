"""The matcher: commutative operands, casts and views, shared nodes, and the reason it gives for a near-miss."""

import torch
from sidestream.compiler.graph.matcher import any_, call, cast, const, either, find, views
from sidestream.compiler.graph.nodes import aten
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

SCALED_SUM = call(aten.relu.default, any_("x") * const("factor") + any_("y"))


def graph_of(function: object, *shapes: tuple[int, ...]) -> fx.Graph:
    return make_fx(function, pre_dispatch=True)(*(torch.randn(shape) for shape in shapes)).graph  # type: ignore[arg-type]


def test_operands_match_in_either_order() -> None:
    graph = graph_of(lambda x, y: torch.relu(y + x * 3.0), (4,), (4,))
    matches, rejected = find(graph, SCALED_SUM, anchor=aten.relu.default)
    assert len(matches) == 1 and not rejected
    assert (matches[0]["x"].name, matches[0]["y"].name, matches[0]["factor"]) == ("x_1", "y_1", 3.0)


def test_a_use_outside_the_match_is_named() -> None:
    graph = graph_of(lambda x, y: (torch.relu(y + x * 3.0), y + x * 3.0), (4,), (4,))
    product = next(node for node in graph.nodes if node.target is aten.mul.Tensor)
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        graph.call_function(aten.neg.default, (product,))
    matches, rejected = find(graph, SCALED_SUM, anchor=aten.relu.default)
    assert not matches and len(rejected) == 1
    assert "mul is also used by neg" in rejected[0]


def test_a_near_miss_says_what_differs() -> None:
    graph = graph_of(lambda x, y: torch.relu(x - y), (4,), (4,))
    matches, rejected = find(graph, SCALED_SUM, anchor=aten.relu.default)
    assert not matches
    assert len(rejected) == 1 and "relu" in rejected[0] and "aten.sub.Tensor" in rejected[0]


def test_a_name_stands_for_one_node() -> None:
    square = any_("x") * any_("x")
    assert len(find(graph_of(lambda x, y: x * x, (4,), (4,)), square)[0]) == 1
    matches, rejected = find(graph_of(lambda x, y: x * y, (4,), (4,)), square, anchor=aten.mul.Tensor)
    assert not matches and "x is both x_1 and y_1" in rejected[0]


def test_casts_and_views_are_looked_through() -> None:
    pattern = call(aten.neg.default, cast(views(any_("x"))))
    for function in (lambda x: -x, lambda x: -x.double(), lambda x: -x.view(2, 2).double()):
        matches, _ = find(graph_of(function, (4,)), pattern)
        assert [match["x"].name for match in matches] == ["x_1"]


def test_a_shared_view_may_live_on() -> None:
    def shared(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.view(4)
        return torch.relu(torch.neg(flat)), flat.sin()

    matches, rejected = find(
        graph_of(shared, (2, 2)),
        call(aten.relu.default, call(aten.neg.default, views(any_("x")))),
        anchor=aten.relu.default,
    )
    assert len(matches) == 1 and matches[0]["x"].name == "x_1" and not rejected


def test_the_first_alternative_that_fits_wins() -> None:
    twice = call(aten.neg.default, call(aten.neg.default, any_("x")))
    pattern = call(aten.relu.default, either(twice, any_("x")))
    assert find(graph_of(lambda x: torch.relu(torch.neg(torch.neg(x))), (4,)), pattern)[0][0]["x"].name == "x_1"
    assert find(graph_of(lambda x: torch.relu(x.sin()), (4,)), pattern)[0][0]["x"].name == "sin"


def test_where_refuses_with_its_own_words() -> None:
    graph = graph_of(lambda x, y: torch.relu(y + x * 3.0), (4,), (4,))
    matches, rejected = find(
        graph,
        SCALED_SUM,
        anchor=aten.relu.default,
        where=lambda match: None if match["factor"] > 5 else "the factor is too small",
    )
    assert not matches and rejected == ["relu: the factor is too small"]
