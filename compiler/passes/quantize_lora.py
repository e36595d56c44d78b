"""e4m3 adapters, and e4m3 activations for them."""
import operator
from typing import Any

import torch
from torch import fx

from ...ops.lora import lora
from ...ops.quantize import quantize_rowwise
from ..nodes import args_of, insert_call, insert_placeholder, is_call, shape_of
from ..recipe import item, quantize
from .base import Context, PassReport


def quantize_lora(graph: fx.Graph, context: Context) -> PassReport:
    """Adapter stacks hold e4m3 with one scale a row; a shrink reads the same FP8 activations as the linear beside it.

    before  q, scale = sidestream.quantize_rowwise(x); lora = sidestream.lora(x, a, b, adapter_index, [4096])
    after   lora = sidestream.lora(q, a_fp8, b_fp8, adapter_index, [4096], a_scale, b_scale, scale)

    The rows of A and B are quantized when an adapter is loaded; B's with alpha / rank in them. `lora_input="bf16"` keeps the 16-bit activations, and so does a
    branch whose input no linear has quantized. Leaves stacks that are computed in the graph. For lora_dtype="fp8" (`auto`: in fp8 mode).
    """
    report = PassReport(0)
    if not context.options.quantizes_lora:
        return report
    stacks: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in list(graph.nodes):
        if not is_call(node, lora):
            continue
        x, a, b, index, slices, *scales = args_of(node)
        computed = next((stack.name for stack in (a, b) if stack.meta.get("kind") != "adapter"), None)
        if computed is not None or any(scale is not None for scale in scales):
            report.rejected.append(f"{node.name}: {computed} is computed in the graph, not loaded" if computed else f"{node.name}: quantized already")
            continue
        for stack in (a, b):
            if stack not in stacks:
                stacks[stack] = _quantized_stack(graph, stack)
        rows = _quantized_rows(x) if context.options.quantizes_lora_input else None
        (a_values, a_scale), (b_values, b_scale) = stacks[a], stacks[b]
        with graph.inserting_before(node if rows is None else _later(graph, node, *rows)):
            inputs = (x, None) if rows is None else rows
            new = insert_call(graph, lora, (inputs[0], a_values, b_values, index, slices, a_scale, b_scale, inputs[1]), like=node)
        node.replace_all_uses_with(new)
        report.matches += 1
    return report


def _quantized_stack(graph: fx.Graph, stack: fx.Node) -> tuple[fx.Node, fx.Node]:
    recipe = quantize(stack.meta["recipe"])
    shape = tuple(int(size) for size in shape_of(stack))
    values = insert_placeholder(graph, f"{stack.name}_fp8", "adapter", shape, torch.float8_e4m3fn, after=stack, recipe=item(recipe, 0))
    scales = insert_placeholder(graph, f"{stack.name}_scale", "adapter", shape[:-1], torch.float32, after=values, recipe=item(recipe, 1))
    return values, scales


def _quantized_rows(x: Any) -> tuple[fx.Node, fx.Node] | None:
    """What a quantization of x for a linear returns; None when nothing quantizes x."""
    rounded = next((user for user in x.users if is_call(user, quantize_rowwise)), None)
    if rounded is None:
        return None
    picked = {args_of(user)[1]: user for user in rounded.users if is_call(user, operator.getitem)}
    return (picked[0], picked[1]) if len(picked) == 2 else None


def _later(graph: fx.Graph, node: fx.Node, *others: fx.Node) -> fx.Node:
    """A place before the delta's first reader at which `others` are known: behind the last of them and `node`."""
    order = {each: place for place, each in enumerate(graph.nodes)}
    return max((node, *others), key=order.__getitem__).next
