"""silu(gate) * up -> `sidestream.silu_mul`; with its projection -> `sidestream.linear_8bit_silu_mul`."""

import torch
from torch import fx

from ....ops.elementwise.quantize import quantize_rowwise
from ....ops.elementwise.silu_mul import silu_mul, silu_mul_quant
from ....ops.linear.kernel_selection import activation_config
from ....ops.linear.linear_8bit import linear_8bit
from ....ops.linear.linear_8bit_silu_mul import linear_8bit_silu_mul
from ....ops.moe.grouped_linear import grouped_linear_8bit
from ....ops.moe.grouped_linear_8bit_silu_mul import grouped_linear_8bit_silu_mul
from ...graph.matcher import Match, any_, call, find
from ...graph.nodes import (
    aten,
    bind,
    calls,
    insert_call,
    insert_picks,
    is_call,
    operands_for,
    replace_picks,
    shape_of,
    slice_range,
    split_delta,
)
from ..base import Context, PassReport, Refused, rewrite_each

GATED = call(aten.silu.default, any_("gate")) * any_("up")


def fuse_silu_mul(graph: fx.Graph, context: Context) -> PassReport:
    """Fuse silu(gate) * up over a packed projection, and the addition of its LoRA delta.

    before  add = linear + lora; silu = aten.silu(add[..., :14336]); mul = silu * add[..., 14336:]
    after   silu_mul = sidestream.silu_mul(linear, lora)

    Leaves products unless gate and up are the two halves of one tensor, as after pack_projections.
    """

    def where(match: Match) -> str | None:
        gate, up = slice_range(match["gate"]), slice_range(match["up"])
        if gate is None or up is None or gate[0] is not up[0]:
            return f"{match['gate'].name} and {match['up'].name} are not slices of one packed projection"
        width = int(shape_of(gate[0])[-1])
        halves = (gate[1:], up[1:]) == ((0, width // 2), (width // 2, width))
        return None if halves else "gate and up are not its first and second half"

    matches, rejected = find(graph, GATED, anchor=aten.silu.default, where=where)
    for match in matches:
        packed, delta = split_delta(bind(match["gate"]).self)
        with graph.inserting_before(match.root):
            new = insert_call(graph, silu_mul, (packed, delta), like=match.root)
        match.root.replace_all_uses_with(new)
    return PassReport(len(matches), rejected)


def fuse_linear_silu_mul(graph: fx.Graph, context: Context) -> PassReport:
    """Fuse SiLU * mul into the launch of an eight-bit gate_up projection that only it reads.

    before  gate_up = sidestream.linear_8bit(q, scale, weight, ...)
            h, q, scale = sidestream.silu_mul_quant(gate_up, None, keep, ...)
    after   h = sidestream.linear_8bit_silu_mul(q, scale, weight, ...); q, scale = sidestream.quantize_rowwise(h, ...)

    For static sizes, also of experts (`grouped_linear_8bit_silu_mul`). Leaves sizes without such a launch in the tuned
    table, and projections with a LoRA delta, since they would wait for the side stream.
    """

    def fuse(node: fx.Node) -> None:
        silu, linear = bind(node), bind(node).gate_up
        _check(linear, silu.delta)
        op = grouped_linear_8bit_silu_mul if is_call(linear, grouped_linear_8bit) else linear_8bit_silu_mul
        with graph.inserting_before(node):
            h = insert_call(graph, op, operands_for(linear, op), like=linear)
            rounded = insert_call(graph, quantize_rowwise, (h, silu.dtype, silu.rotate), like=node)
            results = (h, *insert_picks(graph, rounded, (0, 1), like=node))
        replace_picks(node, dict(enumerate(results)))

    products = calls(graph, silu_mul_quant)
    linears = linear_8bit, grouped_linear_8bit
    return rewrite_each((node for node in products if is_call(bind(node).gate_up, *linears)), fuse)


def _check(linear: fx.Node, delta: fx.Node | None) -> None:
    product = bind(linear)
    q, weight = product.q, product.weight
    added = (product.delta, product.residual) if is_call(linear, linear_8bit) else (product.delta,)
    if any(addend is not None for addend in (delta, *added)):
        raise Refused(f"another op adds to {linear.name} first")
    if len(linear.users) > 1:
        raise Refused(f"{linear.name} has other readers")
    if is_call(linear, grouped_linear_8bit):
        return
    tokens, (n, k) = shape_of(q).numel() // shape_of(q)[-1], shape_of(weight)
    if activation_config(int(tokens), int(n), int(k), int8=weight.meta["val"].dtype == torch.int8) is None:
        raise Refused(f"two launches are as fast for {tokens} tokens")
