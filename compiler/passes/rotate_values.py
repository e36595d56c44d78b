"""V's heads rotated by weights."""

from typing import Any

from torch import fx

from ...ops.attention.append_kv import append_kv
from ...ops.attention.paged_attention import paged_attention
from ...ops.lora.lora import lora
from ..graph.nodes import aten, bind, is_call, shape_of, split_bias, through_views
from ..graph.recipe import hadamard
from ..program.layers import layer_of_name
from .base import Context, PassReport


class _Refused(Exception):
    """Why a layer is left alone."""


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
                raise _Refused(f"heads of {width} are no power of two")
            rotations = [*_made_by(through_views(value)), *_read_by(attention)]
        except _Refused as refusal:
            report.rejected.append(f"{append.name}: {refusal}")
            continue
        for weight, dim in rotations:
            weight.meta["recipe"] = hadamard(weight.meta["recipe"], dim, width)
        report.matches += 1
    return report


def _made_by(value: Any) -> list[tuple[fx.Node, int]]:
    """The weights whose rows are V's channels, each with the dimension of the rows: v_proj's, its bias, and B of its
    adapters.
    """
    base, bias = split_bias(value) if isinstance(value, fx.Node) else (value, None)
    if bias is not None:
        return [*_made_by(through_views(base)), (_loaded(bias), 0)]
    if is_call(value, aten.add.Tensor):
        parts = [through_views(part) for part in (bind(value).self, bind(value).other)]
        return [rotation for part in sorted(parts, key=lambda part: is_call(part, lora)) for rotation in _made_by(part)]
    if is_call(value, lora):
        return [(_loaded(bind(value).b), 1)]
    if is_call(value, aten.linear.default) and bind(value).bias is None:
        return [(_loaded(bind(value).weight), 0)]
    raise _Refused(
        f"{getattr(value, 'name', value)} is neither a linear nor a LoRA branch (is lift_lora or lift_bias off?)"
    )


def _read_by(attention: fx.Node) -> list[tuple[fx.Node, int]]:
    """The weights whose columns are attention's channels: o_proj's, and A of its adapters."""
    found, waiting = [], [attention]
    while waiting:
        for user in waiting.pop().users:
            if through_views(user) is not user:
                waiting.append(user)
            elif is_call(user, lora):
                found.append((_loaded(bind(user).a), 2))
            elif is_call(user, aten.linear.default):
                found.append((_loaded(bind(user).weight), 1))
            else:
                raise _Refused(
                    f"{user.name} reads attention's output and is neither a linear nor a LoRA branch (is lift_lora "
                    "off?)"
                )
    return found


def _loaded(weight: fx.Node) -> fx.Node:
    """The placeholder of a weight that nothing else reads."""
    if weight.op != "placeholder" or "recipe" not in weight.meta:
        raise _Refused(f"{weight.name} is computed in the graph, not loaded")
    if weight.meta["recipe"].op == "dequantize":
        raise _Refused(f"{weight.name} is stored in eight bits, and rotated it would be rounded again")
    if len(weight.users) != 1:
        raise _Refused(f"{weight.name} is read by {len(weight.users)} nodes")
    return weight


def _only(nodes: Any) -> fx.Node:
    found = list(nodes)
    if len(found) != 1:
        raise _Refused(f"{len(found)} paged_attention read its cache")
    return found[0]
