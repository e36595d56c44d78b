"""Weights that a checkpoint stores in eight bits -> one weight, whose recipe says how it is stored."""

from typing import Any

from torch import fx

from ...graph.nodes import CASTS, aten, bind, insert_placeholder, is_call, set_operands, shape_of
from ...graph.recipe import dequantize
from ..base import Context, PassReport


def lift_stored_weights(graph: fx.Graph, context: Context) -> PassReport:
    """A linear's weight that is made of eight-bit values and a scale for each output channel.

    before  mul = weight.float() * weight_scale; linear = aten.linear(x, mul.to(torch.bfloat16))
    after   linear = aten.linear(x, weight_dequantized)  # recipe: dequantize(weight, weight_scale)

    `quantize_linears` takes values and scales as they are; every other pass sees a weight like any other. Matches
    linears of such products. Leaves products of tensors that are no loaded weights.
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, aten.linear.default):
            continue
        made = bind(node).weight
        product = _through_casts(made)
        if not is_call(product, aten.mul.Tensor):
            continue
        values, scales = _through_casts(bind(product).self), bind(product).other
        if not all(isinstance(each, fx.Node) and each.meta.get("kind") == "weight" for each in (values, scales)):
            report.rejected.append(f"{node.name}: {product.name} is no product of two loaded weights")
            continue
        stored, dtype = values.meta["val"].dtype, made.meta["val"].dtype
        recipe = dequantize(values.meta["recipe"], scales.meta["recipe"], stored, dtype)
        name = f"{values.name}_dequantized"
        whole = insert_placeholder(graph, name, "weight", tuple(shape_of(values)), dtype, after=values, recipe=recipe)
        set_operands(node, weight=whole)
        report.matches += 1
    return report


def _through_casts(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target in CASTS:
        node = node.args[0]
    return node
