"""A prompt step's LoRA deltas are added by the linears that they join, and never written."""

import operator

import torch
from torch import fx

from ....ops.linear.linear_8bit import linear_8bit
from ....ops.linear.linear_8bit_lora import fits, linear_8bit_lora
from ....ops.lora.expand import lora_expand
from ....ops.lora.plan import lora_active, lora_plan
from ...graph.nodes import aten, bind, copy_marks, insert_call, is_call, set_operands, shape_of
from ..base import Context, PassReport

FEWEST_TOKENS = 257  # fewer are bound by the weights' bytes: there the expand runs at the same time


def fuse_lora_expand(graph: fx.Graph, context: Context) -> PassReport:
    """A tile of the linear multiplies the shrunk rows of its tokens with the adapters' rows when its own product is
    done.

    before  y = linear_8bit(q, s, w, ws, ...); delta = lora_expand(planes, b, order, tiles, tile, slices, bs)
            h = silu_mul(y, delta, ...)
    after   y = linear_8bit_lora(q, s, w, ws, planes, b, bs, adapter_index, active, slices, bf16)
            h = silu_mul(y, None, ...)

    `active` lists the adapters of each 128 tokens, once a step (`lora_active`). For graphs with static sizes, of many
    tokens, in int8. Matches expands. Leaves deltas that more than one op reads or a plain sum adds, sizes that the
    kernel doesn't take, and everything with lora_lowering="serial" or "side_stream", which keep launches of their own.
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
        expand, plan, product = bind(node), bind(bind(node).token_order).source, bind(linear)
        index = bind(plan).adapter_index
        if plan not in active:
            with graph.inserting_after(plan):
                active[plan] = insert_call(graph, lora_active, (index, bind(plan).num_slots), like=plan)
            copy_marks(plan, active[plan])
        with graph.inserting_before(reader):
            operands = (
                *(product.q, product.scale, product.weight, product.weight_scale),
                *(expand.planes, expand.b, expand.b_scale, index, active[plan], expand.slices, product.out_dtype),
            )
            new = insert_call(graph, linear_8bit_lora, operands, like=linear)
        linear.replace_all_uses_with(new)
        set_operands(reader, **dict.fromkeys(bind(reader).names_of(node)))
        report.matches += 1
    return report


def _joined(expand: fx.Node, lowering: str) -> tuple[fx.Node, fx.Node] | str:
    """(the linear that a delta joins, the op that adds it now), or why it stays."""
    b, order, slices = bind(expand).b, bind(expand).token_order, bind(expand).slices
    if lowering != "auto":
        return f"lora_lowering is {lowering}"
    if not is_call(order, operator.getitem) or not is_call(bind(order).source, lora_plan):
        return "it is not planned here"
    if len(expand.users) != 1:
        return "more than one op reads it"
    reader = next(iter(expand.users))
    if is_call(reader, aten.add.Tensor):
        return f"{reader.name} is a sum, which can't go without it"
    linears = [
        value for value in reader.all_input_nodes if is_call(value, linear_8bit) and shape_of(value) == shape_of(expand)
    ]
    if len(linears) != 1 or len(linears[0].users) != 1:
        return f"{reader.name} doesn't add it to a linear that nobody else reads"
    product = bind(linears[0])
    q, scale, out_dtype = product.q, product.scale, product.out_dtype
    if product.delta is not None or product.residual is not None or scale.meta["val"].dim() != 1:
        return f"something is added to {linears[0].name} first, or its activations have scales by block"
    if any(each.meta["val"].dtype != torch.int8 for each in (q, product.weight, b)) or out_dtype != torch.bfloat16:
        return "the launch takes int8 and makes bf16"
    (tokens, k), (slots, _n, rank) = shape_of(q), shape_of(b)
    if tokens < FEWEST_TOKENS:
        return f"{tokens} tokens: LoRA gains by it from {FEWEST_TOKENS} on"
    return fits(int(tokens), int(k), tuple(slices), int(rank), int(slots)) or (linears[0], reader)
