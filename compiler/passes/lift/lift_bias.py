"""A linear's bias -> an addition of its own."""

from torch import fx

from ...graph.nodes import aten, bind, calls, insert_call
from ..base import Context, PassReport, Refused, rewrite_each


def lift_bias(graph: fx.Graph, context: Context) -> PassReport:
    """Split a linear with a bias into a plain linear and an addition.

    before  linear = aten.linear(x, weight, bias)
    after   linear = aten.linear(x, weight); add = linear + bias

    Readers of the sum can then add the bias themselves, such as `rope_append` in fp32. Leaves computed biases.
    """

    def lift(node: fx.Node) -> None:
        x, weight, bias = bind(node).input, bind(node).weight, bind(node).bias
        if bias.meta.get("kind") != "weight":
            raise Refused(f"its bias {bias.name} is computed in the graph, not loaded")
        with graph.inserting_before(node):
            linear = insert_call(graph, aten.linear.default, (x, weight), like=node)
            total = insert_call(graph, aten.add.Tensor, (linear, bias), like=node)
        node.replace_all_uses_with(total)

    return rewrite_each((node for node in calls(graph, aten.linear.default) if bind(node).bias is not None), lift)
