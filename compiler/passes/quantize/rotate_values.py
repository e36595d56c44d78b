"""V's heads rotated by weights."""

from typing import Any

from torch import fx

from ....ops.attention.append_kv import append_kv
from ....ops.attention.paged_attention import paged_attention
from ...graph.channels import ChannelsError, made_by, read_by
from ...graph.nodes import bind, is_call, shape_of, through_views
from ...graph.recipe import hadamard
from ...program.layers import layer_of_name
from ..base import Context, PassReport


def rotate_values(graph: fx.Graph, context: Context) -> PassReport:
    """Each head of V, and so of attention's output, is multiplied by a Hadamard matrix that v_proj makes and o_proj
    undoes.

    before  v = aten.linear(x, W_v) + bias_v + lora(x, a_v, b_v, ...)
            o = aten.linear(attention, W_o) + lora(attention, a_o, b_o, ...)
    after   the same graph; the recipes of W_v, bias_v and b_v rotate their outputs, those of W_o and a_o their inputs,
            by head

    Attention mixes tokens, not channels, so the result is the same; V and attention's output are then quantized without
    outlier channels. Costs nothing at run time. Matches layers that `rotate_values` names. Leaves those whose weights
    something else reads too, or are no inputs of the graph.
    """
    report = PassReport(0)
    if context.options.rotate_values is False:
        return report
    for append in list(graph.nodes):
        if not is_call(append, append_kv):
            continue
        value, cache = bind(append).v, bind(append).kv_cache
        if not context.options.applies("rotate_values", layer_of_name(cache.name)):
            continue
        try:
            attention = _only(user for user in cache.users if is_call(user, paged_attention))
            width = int(shape_of(value)[-1])
            if width & (width - 1):
                raise ChannelsError(f"heads of {width} are no power of two")
            rotations = [*made_by(through_views(value), "rotated"), *read_by(attention, "rotated")]
        except ChannelsError as refusal:
            report.rejected.append(f"{append.name}: {refusal}")
            continue
        for weight, dim in rotations:
            weight.meta["recipe"] = hadamard(weight.meta["recipe"], dim, width)
        report.matches += 1
    return report


def _only(nodes: Any) -> fx.Node:
    found = list(nodes)
    if len(found) != 1:
        raise ChannelsError(f"{len(found)} paged_attention read its cache")
    return found[0]
