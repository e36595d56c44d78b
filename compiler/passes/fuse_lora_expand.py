"""A prompt step's LoRA deltas are added by the linears that they join, and never written."""

import torch
from torch import fx

from ...ops.linear.linear_8bit import linear_8bit
from ...ops.linear.linear_8bit_lora import fits, linear_8bit_lora
from ...ops.lora.expand import lora_expand
from ...ops.lora.plan import lora_active, lora_plan
from ..graph.nodes import args_of, insert_call, is_call, shape_of
from .base import Context, PassReport

FEWEST_TOKENS = 257  # fewer are bound by the weights' bytes: there the expand runs beside


def fuse_lora_expand(graph: fx.Graph, context: Context) -> PassReport:
    """A tile of the linear multiplies the shrunk rows of its tokens with the adapters' rows when its own product is
    done.

    before  y = linear_8bit(q, s, w, ws, ...); delta = lora_expand(planes, b, order, tiles, tile, slices, bs); h =
            silu_mul(y, delta, ...)
    after   y = linear_8bit_lora(q, s, w, ws, planes, b, bs, adapter_index, active, slices, bf16); h = silu_mul(y, None,
            ...)

    `active` lists the adapters of each 128 tokens, once a step (`lora_active`). For graphs with static sizes, of many
    tokens, in int8. Leaves deltas that more than one op reads, sizes that the kernel doesn't take, and everything with
    lora_lowering="serial" or "side_stream", which keep launches of their own.
    """
    report = PassReport(0)
    active: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if not is_call(node, lora_expand):
            continue
        found = _joined(node, context.options.lora_lowering)
        if isinstance(found, str):
            report.rejected.append(f"{node.name}: {found}")
            continue
        linear, reader = found
        planes, b, order, _tiles, _tile, slices, b_scale = args_of(node)
        plan = args_of(order)[0]
        index, slots, _height = args_of(plan)
        if plan not in active:
            with graph.inserting_after(plan):
                active[plan] = insert_call(graph, lora_active, (index, slots), like=plan)
            active[plan].meta.update({key: plan.meta[key] for key in ("stream", "sm_share") if key in plan.meta})
        q, scale, weight, weight_scale, *_addends, out_dtype = args_of(linear)
        with graph.inserting_before(reader):
            operands = (q, scale, weight, weight_scale, planes, b, b_scale, index, active[plan], slices, out_dtype)
            new = insert_call(graph, linear_8bit_lora, operands, like=linear)
        linear.replace_all_uses_with(new)
        reader.args = tuple(None if value is node else value for value in args_of(reader))
        report.matches += 1
    return report


def _joined(expand: fx.Node, lowering: str) -> tuple[fx.Node, fx.Node] | str:
    """(the linear that a delta joins, the op that adds it now), or why it stays."""
    _planes, b, order, _tiles, _tile, slices, _b_scale = args_of(expand)
    if lowering != "auto":
        return f"lora_lowering is {lowering}"
    if not is_call(args_of(order)[0], lora_plan):
        return "it is not planned here"
    if len(expand.users) != 1:
        return "more than one op reads it"
    reader = next(iter(expand.users))
    linears = [
        value for value in args_of(reader) if is_call(value, linear_8bit) and shape_of(value) == shape_of(expand)
    ]
    if len(linears) != 1 or len(linears[0].users) != 1:
        return f"{reader.name} doesn't add it to a linear that nobody else reads"
    q, scale, weight, _weight_scale, added, residual, out_dtype = args_of(linears[0])
    if added is not None or residual is not None or scale.meta["val"].dim() != 1:
        return f"something is added to {linears[0].name} first, or its activations have scales by block"
    if any(each.meta["val"].dtype != torch.int8 for each in (q, weight, b)) or out_dtype != torch.bfloat16:
        return "the launch takes int8 and makes bf16"
    (tokens, k), (slots, _n, rank) = shape_of(q), shape_of(b)
    if tokens < FEWEST_TOKENS:
        return f"{tokens} tokens: LoRA gains by it from {FEWEST_TOKENS} on"
    return fits(int(tokens), int(k), tuple(slices), int(rank), int(slots)) or (linears[0], reader)
