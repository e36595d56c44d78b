"""Constant factors after projections and norms -> factors in their weights' recipes."""

from typing import Any

from torch import fx

from ....ops.elementwise.rms_norm import rms_norm
from ....ops.lora.adjust import lora_adjust
from ....ops.moe.combine import moe_combine
from ....ops.moe.expert_linear import expert_linear
from ...graph.nodes import DELTAS, aten, bind, calls, is_call, through_views
from ...graph.recipe import scale
from ..base import Context, PassReport, Refused, rewrite_each


def fold_multipliers(graph: fx.Graph, context: Context) -> PassReport:
    """Fold a constant factor after a projection or norm (Granite's multipliers) into its weights.

    before  add = aten.linear(x, W_o) + lora(x, a_o, b_o, ...); mul = add * 0.22; add_1 = residual + mul
    after   add = aten.linear(x, W_o) + lora(x, a_o, b_o, ...); add_1 = residual + add
            # the recipes of W_o and b_o end in a factor of 0.22

    The factor of a weighted sum of experts moves into the weights of their last linear. For later passes the residual
    stream is then a plain model's. Leaves weights with other readers and computed weights.
    """

    def fold(node: fx.Node) -> None:
        weights = _weights(bind(node).self)
        for weight in weights:
            weight.meta["recipe"] = scale(weight.meta["recipe"], float(bind(node).other))
        node.replace_all_uses_with(bind(node).self)

    return rewrite_each((node for node in calls(graph, aten.mul.Tensor) if _scales_weights(node)), fold)


def _scales_weights(product: fx.Node) -> bool:
    """Return whether a product multiplies a projection or norm by a number."""
    factors = bind(product)
    source = through_views(factors.self)
    return isinstance(factors.other, int | float) and is_call(
        source, aten.linear.default, aten.add.Tensor, lora_adjust, rms_norm, moe_combine
    )


def _weights(value: Any) -> list[fx.Node]:
    """Return the loaded tensors in which `value` is linear, each once. Raises Refused."""
    if not isinstance(value, fx.Node) or len(value.users) != 1:
        raise Refused(f"{getattr(value, 'name', value)} has other readers")
    if through_views(value) is not value:
        return _weights(bind(value).self)
    if is_call(value, aten.add.Tensor) and bind(value).alpha == 1:
        return [*_weights(bind(value).self), *_weights(bind(value).other)]
    if is_call(value, moe_combine):
        return _weights(bind(value).z)
    if is_call(value, expert_linear) or (is_call(value, aten.linear.default) and bind(value).bias is None):
        return [_loaded(bind(value).weight)]
    if is_call(value, *DELTAS):
        return [_loaded(bind(value).b)]
    if is_call(value, lora_adjust):
        shift = bind(value).shift
        return [*_weights(bind(value).y), *([] if shift is None else [_loaded(shift)])]
    return [_loaded(bind(value).weight if is_call(value, rms_norm) else value)]


def _loaded(weight: fx.Node) -> fx.Node:
    if weight.op != "placeholder" or "recipe" not in weight.meta or len(weight.users) != 1:
        raise Refused(f"{weight.name} is not a loaded tensor with this reader only")
    return weight
