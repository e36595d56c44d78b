"""Adapters and their activations in eight bits."""

from typing import Any

import torch
from torch import fx

from ....ops.elementwise.quantize import quantize_rowwise
from ....ops.moe.route import moe_route
from ...graph.nodes import (
    DELTAS,
    bind,
    calls,
    insert_call,
    insert_placeholder,
    is_call,
    operands_for,
    picks_of,
    shape_of,
)
from ...graph.recipe import item, quantize
from ...options import torch_dtype
from ..base import Context, PassReport, Refused, rewrite_each


def quantize_lora(graph: fx.Graph, context: Context) -> PassReport:
    """Quantize adapter stacks with one scale per row; shrinks read the same quantized activations as the linear.

    before  q, scale = sidestream.quantize_rowwise(x, ...); lora = sidestream.lora(x, a, b, adapter_index, [4096])
    after   lora = sidestream.lora(q, a_int8, b_int8, adapter_index, [4096], a_scale, b_scale, scale)

    Rows are quantized when an adapter is loaded: B with alpha / rank, A rotated as the activations. Shrinks read 16-bit
    activations with `lora_input="bf16"`, or if no linear has quantized them. Runs for lora_dtype="int8" and "fp8"
    (`auto`: int8 in int8 mode). Leaves computed and quantized stacks, and those of routers.
    """
    if not context.options.quantizes_lora:
        return PassReport(0)
    dtype = torch_dtype(context.options.precision)
    stacks: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    def quantize_branch(node: fx.Node) -> None:
        branch = bind(node)
        x, a, b = branch.x, branch.a, branch.b
        for stack in (a, b):
            if stack.meta.get("kind") != "adapter":
                raise Refused(f"{stack.name} is computed in the graph, not loaded")
        if any(scale is not None for scale in (branch.a_scale, branch.b_scale, branch.x_scale)):
            raise Refused("quantized already")
        if any(is_call(user, moe_route) for user in node.users):
            raise Refused("it adds to the logits of a router, which are never quantized")
        rounded = _rounded(x) if context.options.quantizes_lora_input else None
        rows = None if rounded is None else _results(rounded)
        for stack, rotate in ((a, 0 if rounded is None else bind(rounded).rotate), (b, 0)):
            if stack not in stacks:
                stacks[stack] = _quantized_stack(graph, stack, dtype, rotate)
        (a_values, a_scale), (b_values, b_scale) = stacks[a], stacks[b]
        with graph.inserting_before(node if rows is None else _later(graph, node, *rows)):
            read, read_scale = (x, None) if rows is None else rows
            quantized = {"a": a_values, "b": b_values, "a_scale": a_scale, "b_scale": b_scale, "x_scale": read_scale}
            op = next(each for each in DELTAS if is_call(node, each))
            new = insert_call(graph, op, operands_for(node, op, x=read, **quantized), like=node)
        node.replace_all_uses_with(new)

    return rewrite_each(calls(graph, *DELTAS), quantize_branch)


def _quantized_stack(graph: fx.Graph, stack: fx.Node, dtype: torch.dtype, rotate: int) -> tuple[fx.Node, fx.Node]:
    recipe = quantize(stack.meta["recipe"], dtype, rotate)
    shape = tuple(int(size) for size in shape_of(stack))
    name = "int8" if dtype == torch.int8 else "fp8"
    values = insert_placeholder(
        graph, f"{stack.name}_{name}", "adapter", shape, dtype, after=stack, recipe=item(recipe, 0)
    )
    scales = insert_placeholder(
        graph, f"{stack.name}_scale", "adapter", shape[:-1], torch.float32, after=values, recipe=item(recipe, 1)
    )
    return values, scales


def _rounded(x: Any) -> fx.Node | None:
    """Return a linear's quantization of x; None without one, or if one of its results has no reader."""
    found = next((user for user in x.users if is_call(user, quantize_rowwise)), None)
    return found if found is not None and _results(found) is not None else None


def _results(rounded: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the rows and scales of a quantization."""
    picked = dict(picks_of(rounded))
    return (picked[0], picked[1]) if len(picked) == 2 else None


def _later(graph: fx.Graph, node: fx.Node, *others: fx.Node) -> fx.Node:
    """Return a node before the delta's first reader and not before `node` and `others`, to insert the branch there."""
    order = {each: place for place, each in enumerate(graph.nodes)}
    return max((node, *others), key=order.__getitem__).next
