"""Weights of linears as a file has rounded them."""

from torch import fx

from ....ops.linear.linear_8bit import linear_8bit
from ...graph.nodes import bind, is_call
from ...graph.recipe import rounded
from ..base import Context, PassReport


def use_rounded_weights(graph: fx.Graph, context: Context) -> PassReport:
    """The values and scales of a linear's weight come from a file that `sidestream calibrate --round` has written.

    before  linear = sidestream.linear_8bit(q, scale, weight_int8, weight_scale, ...)  # recipe: quantize(W)[0]
    after   the same graph; weight_int8's recipe is rounded(quantize(W)), and so is weight_scale's

    Rounding one weight up or down makes up for what rounding the others has done to the product with typical inputs
    (GPTQ, arXiv 2210.17323). Only the loaded values differ: kernels, formats and adapters are the same. Matches every
    linear in eight bits with `rounded_weights`. Leaves weights that the checkpoint stores in eight bits already.
    """
    report = PassReport(0)
    if not context.options.rounded_weights:
        return report
    for node in graph.nodes:
        if not is_call(node, linear_8bit):
            continue
        operands = (bind(node).weight, bind(node).weight_scale)
        recipes = [operand.meta["recipe"] for operand in operands]
        if any(recipe.op != "item" for recipe in recipes):
            report.rejected.append(f"{node.name}: the checkpoint stores {operands[0].name} in eight bits")
            continue
        for operand, recipe in zip(operands, recipes, strict=True):
            operand.meta["recipe"] = rounded(recipe.args[0], recipe.attrs["index"])
        report.matches += 1
    return report
