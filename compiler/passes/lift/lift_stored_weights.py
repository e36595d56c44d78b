"""Weights stored in eight bits -> one weight with a `dequantize` recipe."""

from typing import Any

from torch import fx

from ....ops.moe.expert_linear import expert_linear
from ...graph.nodes import CASTS, aten, bind, calls, insert_placeholder, is_call, set_operands, shape_of
from ...graph.recipe import dequantize
from ..base import Context, PassReport, Refused, rewrite_each


def lift_stored_weights(graph: fx.Graph, context: Context) -> PassReport:
    """Replace the product of eight-bit values and channel scales by one weight with a `dequantize` recipe.

    before  mul = weight.float() * weight_scale; linear = aten.linear(x, mul.to(torch.bfloat16))
    after   linear = aten.linear(x, weight_dequantized)  # recipe: dequantize(weight, weight_scale)

    `quantize_linears` uses values and scales unchanged; for other passes this is a weight like any other. Leaves
    products of computed tensors.
    """

    def lift(node: fx.Node) -> None:
        weight = bind(node).weight
        product = _through_casts(weight)
        values, scales = _through_casts(bind(product).self), bind(product).other
        if not all(isinstance(each, fx.Node) and each.meta.get("kind") == "weight" for each in (values, scales)):
            raise Refused(f"{product.name} is not a product of two loaded weights")
        stored, dtype = values.meta["val"].dtype, weight.meta["val"].dtype
        recipe = dequantize(values.meta["recipe"], scales.meta["recipe"], stored, dtype)
        name = f"{values.name}_dequantized"
        whole = insert_placeholder(graph, name, "weight", tuple(shape_of(values)), dtype, after=values, recipe=recipe)
        set_operands(node, weight=whole)

    linears = calls(graph, aten.linear.default, expert_linear)
    return rewrite_each((node for node in linears if is_call(_through_casts(bind(node).weight), aten.mul.Tensor)), lift)


def _through_casts(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target in CASTS:
        node = node.args[0]
    return node
