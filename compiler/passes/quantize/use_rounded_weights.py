"""Weights of linears that a calibration has rounded."""

from torch import fx

from ....ops.linear.linear_8bit import linear_8bit
from ...graph.nodes import bind, calls
from ...graph.recipe import rounded
from ..base import Context, PassReport, Refused, rewrite_each


def use_rounded_weights(graph: fx.Graph, context: Context) -> PassReport:
    """Load the weights of linears that `sidestream calibrate --round` has rounded.

    before  linear = sidestream.linear_8bit(q, scale, weight_int8, weight_scale, ...)  # recipe: quantize(W)[0]
    after   the same graph; the recipes of weight_int8 and weight_scale are rounded(quantize(W))

    Each weight is rounded so that it compensates for the rounding of the others on typical inputs (GPTQ, arXiv
    2210.17323). Only values differ. Leaves weights that the checkpoint stores in eight bits.
    """
    if not context.options.rounded_weights:
        return PassReport(0)

    def use(node: fx.Node) -> None:
        operands = (bind(node).weight, bind(node).weight_scale)
        recipes = [operand.meta["recipe"] for operand in operands]
        if any(recipe.op != "item" for recipe in recipes):
            raise Refused(f"the checkpoint stores {operands[0].name} in eight bits")
        for operand, recipe in zip(operands, recipes, strict=True):
            operand.meta["recipe"] = rounded(recipe.args[0], recipe.attrs["index"])

    return rewrite_each(calls(graph, linear_8bit), use)
