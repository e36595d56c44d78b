"""Rowwise int8 or e4m3 on every linear."""

import torch
from torch import fx

from ....ops.attention.paged_attention import paged_attention
from ....ops.elementwise.quantize import SILU_ROTATES, quantize_rowwise
from ....ops.elementwise.silu_mul import silu_mul
from ....ops.linear.linear_8bit import linear_8bit
from ...graph.nodes import aten, bind, insert_call, insert_picks, insert_placeholder, is_call, shape_of, through_views
from ...graph.recipe import item, quantize, stored_parts
from ...options import torch_dtype
from ..base import Context, PassReport

ALIGNMENT = 16  # bytes of a row of weights or activations: kernels read it in such pieces


def quantize_linears(graph: fx.Graph, context: Context) -> PassReport:
    """Weights get one scale per output channel (when they are loaded), activations one per token (in the graph).

    before  linear = aten.linear(x, weight)
    after   q, scale = sidestream.quantize_rowwise(x, torch.int8, rotate=128)
            linear_8bit = sidestream.linear_8bit(q, scale, weight_int8, weight_scale, None, None, torch.bfloat16)

    In int8 mode x and the weight's rows are rotated in blocks of columns first (128 after SiLU, 8 after a norm),
    which leaves the product as it was and no column far larger than the others; not where attention makes x, whose
    heads `rotate_values` can rotate for nothing. Where a checkpoint stores the weight in this dtype already, its values
    and scales are taken as they are. Matches linears with a loaded weight. Leaves linears with a bias, with
    columns that are no multiple of 16, and, with `lm_head="bf16"`, the last linear of the graph. Runs in int8 and fp8
    mode only.
    """
    report = PassReport(0)
    if not context.options.quantizes:
        return report
    dtype = torch_dtype(context.options.precision)
    quantized: dict[fx.Node, tuple[fx.Node, ...]] = {}  # linears of one activation share its quantized form
    linears = [node for node in graph.nodes if is_call(node, aten.linear.default)]
    for node in linears:
        reason = _refusal(node, last=node is linears[-1], context=context)
        if reason is not None:
            report.rejected.append(f"{node.name}: {reason}")
            continue
        x, weight = bind(node).input, bind(node).weight
        kept = stored_parts(weight.meta["recipe"], dtype)
        rotates = dtype == torch.int8 and context.options.rotate_activations and kept is None
        rotate = _rotation(x, context.options.norm_rotation) if rotates else 0
        recipe = quantize(weight.meta["recipe"], dtype, rotate)
        values_recipe, scales_recipe = kept or (item(recipe, 0), item(recipe, 1))
        shape = tuple(int(size) for size in shape_of(weight))
        stored = insert_placeholder(
            graph,
            f"{weight.name}_{context.options.precision}",
            "weight",
            shape,
            dtype,
            after=weight,
            recipe=values_recipe,
        )
        scales = insert_placeholder(
            graph, f"{weight.name}_scale", "weight", shape[:1], torch.float32, after=stored, recipe=scales_recipe
        )
        with graph.inserting_before(node):
            if x not in quantized:
                rounded = insert_call(graph, quantize_rowwise, (x, dtype, rotate), like=node)
                quantized[x] = tuple(insert_picks(graph, rounded, (0, 1), like=node))
            new = insert_call(
                graph, linear_8bit, (*quantized[x], stored, scales, None, None, node.meta["val"].dtype), like=node
            )
        node.replace_all_uses_with(new)
        report.matches += 1
    return report


def _rotation(x: fx.Node, norm_rotation: int) -> int:
    """Columns of a rotated block of an activation, by what makes it."""
    source = through_views(x)
    return 0 if is_call(source, paged_attention) else SILU_ROTATES if is_call(source, silu_mul) else norm_rotation


def _refusal(node: fx.Node, last: bool, context: Context) -> str | None:
    weight = bind(node).weight
    if weight.meta.get("kind") != "weight":
        return f"{weight.name} is computed in the graph, not loaded"
    if bind(node).bias is not None:
        return "it has a bias (is lift_bias off?)"
    columns = int(shape_of(weight)[1])
    if columns % ALIGNMENT:
        return f"{weight.name} has {columns} columns: eight bits need a multiple of {ALIGNMENT}"
    if last and context.options.lm_head == "bf16":
        return "lm_head='bf16' keeps the output projection"
    return None
