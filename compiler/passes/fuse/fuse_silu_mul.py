"""silu(gate) * up over a packed projection -> `sidestream.silu_mul`; in decode programs of many tokens, into the
projection's own launch.
"""

import torch
from torch import fx

from ....ops.elementwise.quantize import quantize_rowwise
from ....ops.elementwise.silu_mul import silu_mul, silu_mul_quant
from ....ops.linear.linear_8bit import linear_8bit
from ....ops.linear.linear_8bit_silu_mul import linear_8bit_silu_mul
from ....ops.linear.tuning import activation_config
from ...graph.matcher import Match, any_, call, find
from ...graph.nodes import (
    aten,
    bind,
    insert_call,
    insert_picks,
    is_call,
    replace_picks,
    shape_of,
    slice_range,
    split_delta,
)
from ..base import Context, PassReport

GATED = call(aten.silu.default, any_("gate")) * any_("up")


def fuse_silu_mul(graph: fx.Graph, context: Context) -> PassReport:
    """The MLP's gate, with the LoRA delta of the packed projection added inside.

    before  add = linear + lora; silu = aten.silu(add[..., :14336]); mul = silu * add[..., 14336:]
    after   silu_mul = sidestream.silu_mul(linear, lora)

    Matches silu(x) * y. Leaves gates whose two inputs are not the two halves of one tensor (pack_projections makes them
    so).
    """

    def where(match: Match) -> str | None:
        gate, up = slice_range(match["gate"]), slice_range(match["up"])
        if gate is None or up is None or gate[0] is not up[0]:
            return f"{match['gate'].name} and {match['up'].name} are not slices of one packed projection"
        width = int(shape_of(gate[0])[-1])
        return (
            None
            if (gate[1:], up[1:]) == ((0, width // 2), (width // 2, width))
            else "gate and up are not its first and second half"
        )

    matches, rejected = find(graph, GATED, anchor=aten.silu.default, where=where)
    for match in matches:
        packed, delta = split_delta(bind(match["gate"]).self)
        with graph.inserting_before(match.root):
            new = insert_call(graph, silu_mul, (packed, delta), like=match.root)
        match.root.replace_all_uses_with(new)
    return PassReport(len(matches), rejected)


def fuse_linear_silu_mul(graph: fx.Graph, context: Context) -> PassReport:
    """The projection stores silu(gate) * up instead of gate and up, which nobody else reads.

    before  gate_up = sidestream.linear_8bit(q, scale, weight, ...)
            h, q, scale = sidestream.silu_mul_quant(gate_up, None, keep, ...)
    after   h = sidestream.linear_8bit_silu_mul(q, scale, weight, ...); q, scale = sidestream.quantize_rowwise(h, ...)

    For graphs with static sizes. Matches SiLU * mul right after an eight-bit linear. Leaves sizes for which the tuned
    table has no such launch, and projections that a LoRA delta joins: fused, they would wait for the side stream.
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, silu_mul_quant):
            continue
        silu = bind(node)
        linear, delta = silu.gate_up, silu.delta
        if not is_call(linear, linear_8bit):
            continue
        reason = _stays(linear, delta)
        if reason is not None:
            report.rejected.append(f"{node.name}: {reason}")
            continue
        product = bind(linear)
        operands = (product.q, product.scale, product.weight, product.weight_scale, None, product.out_dtype)
        with graph.inserting_before(node):
            h = insert_call(graph, linear_8bit_silu_mul, operands, like=linear)
            rounded = insert_call(graph, quantize_rowwise, (h, silu.dtype, silu.rotate), like=node)
            results = (h, *insert_picks(graph, rounded, (0, 1), like=node))
        replace_picks(node, dict(enumerate(results)))
        report.matches += 1
    return report


def _stays(linear: fx.Node, delta: fx.Node | None) -> str | None:
    product = bind(linear)
    q, weight = product.q, product.weight
    if any(addend is not None for addend in (delta, product.delta, product.residual)):
        return f"something is added to {linear.name} first"
    if len(linear.users) > 1:
        return f"{linear.name} has other readers"
    tokens, (n, k) = shape_of(q).numel() // shape_of(q)[-1], shape_of(weight)
    config = activation_config(int(tokens), int(n), int(k), int8=weight.meta["val"].dtype == torch.int8)
    return None if config is not None else f"two launches are as fast for {tokens} tokens"
