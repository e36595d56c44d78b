"""A linear's bias -> an addition of its own."""

from torch import fx

from ...graph.nodes import aten, bind, insert_call, is_call
from ..base import Context, PassReport


def lift_bias(graph: fx.Graph, context: Context) -> PassReport:
    """A projection with a bias becomes a plain linear and a sum, so that what reads the sum can add the bias itself.

    before  linear = aten.linear(x, weight, bias)
    after   linear = aten.linear(x, weight); add = linear + bias

    The packed q/k/v row's bias ends in `rope_append`, which sums in fp32: no linear has to know of it. Matches linears
    with a loaded bias. Leaves a bias that is computed in the graph.
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, aten.linear.default) or bind(node).bias is None:
            continue
        x, weight, bias = bind(node).input, bind(node).weight, bind(node).bias
        if bias.meta.get("kind") != "weight":
            report.rejected.append(f"{node.name}: its bias {bias.name} is computed in the graph, not loaded")
            continue
        with graph.inserting_before(node):
            linear = insert_call(graph, aten.linear.default, (x, weight), like=node)
            total = insert_call(graph, aten.add.Tensor, (linear, bias), like=node)
        node.replace_all_uses_with(total)
        report.matches += 1
    return report
