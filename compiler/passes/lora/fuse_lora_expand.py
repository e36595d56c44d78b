"""LoRA deltas of a prompt step -> part of the linears to which they are added."""

import operator

import torch
from torch import fx

from ....ops.linear.linear_8bit import linear_8bit
from ....ops.linear.linear_8bit_lora import fits, linear_8bit_lora
from ....ops.lora.expand import lora_expand
from ....ops.lora.plan import lora_active, lora_plan
from ...graph.nodes import aten, bind, calls, copy_marks, insert_call, is_call, set_operands, shape_of
from ..base import Context, PassReport, Refused, rewrite_each

FEWEST_TOKENS = 257  # with fewer, linears are bound by bytes, and the expand runs at the same time


def fuse_lora_expand(graph: fx.Graph, context: Context) -> PassReport:
    """Compute a prompt step's LoRA delta in the tiles of its linear, without writing the delta.

    before  y = linear_8bit(q, s, w, ws, ...); delta = lora_expand(planes, b, order, tiles, tile, slices, bs)
            h = silu_mul(y, delta, ...)
    after   y = linear_8bit_lora(q, s, w, ws, planes, b, bs, adapter_index, active, slices, bf16)
            h = silu_mul(y, None, ...)

    `active` lists the adapters of each 128 tokens and is computed once per step (`lora_active`). For static sizes of
    many tokens, in int8. Leaves deltas with several readers or in a plain sum, sizes that the kernel does not support,
    and all deltas with lora_lowering="serial" or "side_stream".
    """
    active: dict[fx.Node, fx.Node] = {}

    def fuse(node: fx.Node) -> None:
        linear, reader = _joined(node, context.options.lora_lowering)
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

    return rewrite_each(calls(graph, lora_expand), fuse)


def _joined(expand: fx.Node, lowering: str) -> tuple[fx.Node, fx.Node]:
    """Return (the linear of a delta, the op that adds the two). Raises Refused."""
    b, order, slices = bind(expand).b, bind(expand).token_order, bind(expand).slices
    if lowering != "auto":
        raise Refused(f"lora_lowering is {lowering}")
    if not is_call(order, operator.getitem) or not is_call(bind(order).source, lora_plan):
        raise Refused("its token order is not from a lora_plan of this graph")
    if len(expand.users) != 1:
        raise Refused("more than one op reads it")
    reader = next(iter(expand.users))
    if is_call(reader, aten.add.Tensor):
        raise Refused(f"{reader.name} is a plain sum, not an op with an optional delta")
    shape, operands = shape_of(expand), reader.all_input_nodes
    linears = [each for each in operands if is_call(each, linear_8bit) and shape_of(each) == shape]
    if len(linears) != 1 or len(linears[0].users) != 1:
        raise Refused(f"{reader.name} doesn't add it to a linear without other readers")
    product = bind(linears[0])
    q, scale, out_dtype = product.q, product.scale, product.out_dtype
    if product.delta is not None or product.residual is not None or scale.meta["val"].dim() != 1:
        raise Refused(f"another op adds to {linears[0].name} first, or its activations have block scales")
    if any(each.meta["val"].dtype != torch.int8 for each in (q, product.weight, b)) or out_dtype != torch.bfloat16:
        raise Refused("the kernel supports only int8 operands and bf16 results")
    (tokens, k), (slots, _n, rank) = shape_of(q), shape_of(b)
    if tokens < FEWEST_TOKENS:
        raise Refused(f"{tokens} tokens: faster from {FEWEST_TOKENS} on")
    reason = fits(int(tokens), int(k), tuple(slices), int(rank), int(slots))
    if reason:
        raise Refused(reason)
    return linears[0], reader
