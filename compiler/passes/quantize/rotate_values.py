"""Heads of V rotated by the weights of v_proj and o_proj."""

from torch import fx

from ....ops.attention.append_kv import append_kv
from ....ops.attention.paged_attention import paged_attention
from ...graph.layer_names import layer_of_name
from ...graph.nodes import bind, calls, is_call, set_operands, shape_of, through_views
from ...graph.projections import adjustment_of, producing_weights, reading_weights
from ...graph.recipe import hadamard
from ..base import Context, PassReport, Refused, rewrite_each


def rotate_values(graph: fx.Graph, context: Context) -> PassReport:
    """Fold a Hadamard rotation of each head of V into v_proj, and its inverse into o_proj.

    before  v = aten.linear(x, W_v) + bias_v + lora(x, a_v, b_v, ...)
            o = aten.linear(attention, W_o) + lora(attention, a_o, b_o, ...)
    after   the same graph; the recipes of W_v, bias_v and b_v rotate their outputs, those of W_o and a_o their inputs,
            by head

    Attention mixes tokens, not channels, so the result is the same, but V and attention's output are quantized without
    outlier channels, at no cost at run time. An adapter's gain applies to the values before the rotation: `lora_adjust`
    rotates them back and forth. Matches layers in `rotate_values`. Leaves weights with other readers and computed
    weights.
    """
    if context.options.rotate_values is False:
        return PassReport(0)

    def applies(append: fx.Node) -> bool:
        return context.options.applies("rotate_values", layer_of_name(bind(append).kv_cache.name))

    def rotate(append: fx.Node) -> None:
        value, cache = bind(append).v, bind(append).kv_cache
        attentions = [user for user in cache.users if is_call(user, paged_attention)]
        if len(attentions) != 1:
            raise Refused(f"{len(attentions)} paged_attention read its cache")
        width = int(shape_of(value)[-1])
        if width & (width - 1):
            raise Refused(f"the head dimension {width} is not a power of two")
        for weight, dim in [
            *producing_weights(through_views(value), "rotated"),
            *reading_weights(attentions[0], "rotated"),
        ]:
            weight.meta["recipe"] = hadamard(weight.meta["recipe"], dim, width)
        adjust = adjustment_of(through_views(value))
        if adjust is not None and bind(adjust).gain is not None:
            set_operands(adjust, rotate=width, end=int(shape_of(adjust)[-1]))

    return rewrite_each(filter(applies, calls(graph, append_kv)), rotate)
