"""Rowwise int8 or e4m3 on every linear."""

import torch
from torch import fx

from ....ops.attention.paged_attention import paged_attention
from ....ops.elementwise.quantize import SILU_ROTATES, quantize_rowwise
from ....ops.elementwise.silu_mul import silu_mul
from ....ops.linear.linear_8bit import linear_8bit
from ....ops.moe.expert_linear import expert_linear, expert_linear_8bit
from ...graph.nodes import (
    aten,
    bind,
    calls,
    insert_call,
    insert_picks,
    insert_placeholder,
    is_call,
    shape_of,
    through_views,
)
from ...graph.projections import input_of
from ...graph.recipe import item, quantize, stored_parts
from ...options import torch_dtype
from ..base import Context, PassReport, Refused, rewrite_each

ALIGNMENT = 16  # bytes: kernels read rows of weights and activations in pieces of this size


def quantize_linears(graph: fx.Graph, context: Context) -> PassReport:
    """Quantize each linear: weights with one scale per output channel, activations with one per token.

    before  linear = aten.linear(x, weight)
    after   q, scale = sidestream.quantize_rowwise(x, torch.int8, rotate=128)
            linear_8bit = sidestream.linear_8bit(q, scale, weight_int8, weight_scale, None, None, torch.bfloat16)

    In int8 mode x and the weight's rows are first rotated in blocks of columns (128 after SiLU, `norm_rotation` after a
    norm). This spreads outliers and does not change the product. There is no rotation after attention: `rotate_values`
    rotates heads at no cost. Linears of experts become `expert_linear_8bit`; routers stay. Weights that a checkpoint
    stores in this dtype are used unchanged. Leaves linears with a computed weight, with a bias, or with a number of
    columns that is not a multiple of 16, and the last linear with `lm_head="bf16"`.
    """
    options = context.options
    if not options.quantizes:
        return PassReport(0)
    dtype = torch_dtype(options.precision)
    quantized: dict[fx.Node, tuple[fx.Node, ...]] = {}  # linears of one activation share its quantized form
    linears = list(calls(graph, aten.linear.default, expert_linear))

    def quantize_linear(node: fx.Node) -> None:
        _check(node, is_last=node is linears[-1], context=context)
        x, weight = input_of(node), bind(node).weight
        kept = stored_parts(weight.meta["recipe"], dtype)
        rotates = dtype == torch.int8 and options.rotate_activations and kept is None
        rotate = _rotation(x, options.norm_rotation) if rotates else 0
        recipe = quantize(weight.meta["recipe"], dtype, rotate)
        values_recipe, scales_recipe = kept or (item(recipe, 0), item(recipe, 1))
        shape = tuple(int(size) for size in shape_of(weight))
        name = f"{weight.name}_{options.precision}"
        values = insert_placeholder(graph, name, "weight", shape, dtype, after=weight, recipe=values_recipe)
        scales = insert_placeholder(
            graph, f"{weight.name}_scale", "weight", shape[:-1], torch.float32, after=values, recipe=scales_recipe
        )
        with graph.inserting_before(node):
            if x not in quantized:
                rounded = insert_call(graph, quantize_rowwise, (x, dtype, rotate), like=node)
                quantized[x] = tuple(insert_picks(graph, rounded, (0, 1), like=node))
            op, added = linear_8bit, (None, None)
            if is_call(node, expert_linear):
                op, added = expert_linear_8bit, (bind(node).experts, bind(node).pairs_per_row)
            operands = (*quantized[x], values, scales, *added, node.meta["val"].dtype)
            node.replace_all_uses_with(insert_call(graph, op, operands, like=node))

    return rewrite_each(linears, quantize_linear)


def _rotation(x: fx.Node, norm_rotation: int) -> int:
    """Return the columns of a rotated block of an activation, from its producer."""
    source = through_views(x)
    return 0 if is_call(source, paged_attention) else SILU_ROTATES if is_call(source, silu_mul) else norm_rotation


def _check(node: fx.Node, is_last: bool, context: Context) -> None:
    weight = bind(node).weight
    if weight.meta.get("kind") != "weight":
        raise Refused(f"{weight.name} is computed in the graph, not loaded")
    if is_call(node, aten.linear.default) and bind(node).bias is not None:
        raise Refused("it has a bias (is lift_bias off?)")
    columns = int(shape_of(weight)[-1])
    if columns % ALIGNMENT:
        raise Refused(f"{weight.name} has {columns} columns: eight bits need a multiple of {ALIGNMENT}")
    if is_last and context.options.lm_head == "bf16":
        raise Refused("lm_head='bf16' keeps the output projection")
