"""Constant factors (Granite's multipliers) move into the weights before them."""

from typing import Any

from torch import fx

from ....ops.elementwise.rms_norm import rms_norm
from ....ops.lora.lora import lora
from ...graph.nodes import aten, bind, is_call, through_views
from ...graph.recipe import scale
from ..base import Context, PassReport


class _Refused(Exception):
    """Why a product stays."""


def fold_multipliers(graph: fx.Graph, context: Context) -> PassReport:
    """What a projection or a norm makes, times a number, becomes that of scaled weights.

    before  add = aten.linear(x, W_o) + lora(x, a_o, b_o, ...); mul = add * 0.22; add_1 = residual + mul
    after   add = aten.linear(x, W_o) + lora(x, a_o, b_o, ...); add_1 = residual + add
            # the recipes of W_o and b_o end in a factor of 0.22

    The residual stream's sums are then a plain model's, which later passes know. Matches products of a number and a
    linear (with its bias and LoRA branch) or a norm. Leaves those whose weights something else reads too, or that are
    no inputs of the graph.
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, aten.mul.Tensor) or not isinstance(bind(node).other, int | float):
            continue
        source = bind(node).self
        if not is_call(through_views(source), aten.linear.default, aten.add.Tensor, rms_norm):
            continue
        try:
            weights = _weights(source)
        except _Refused as refusal:
            report.rejected.append(f"{node.name}: {refusal}")
            continue
        for weight in weights:
            weight.meta["recipe"] = scale(weight.meta["recipe"], float(bind(node).other))
        node.replace_all_uses_with(source)
        report.matches += 1
    return report


def _weights(value: Any) -> list[fx.Node]:
    """The loaded tensors of which `value` is a linear function, each once."""
    if not isinstance(value, fx.Node) or len(value.users) != 1:
        raise _Refused(f"{getattr(value, 'name', value)} is read by something else too")
    if through_views(value) is not value:
        return _weights(bind(value).self)
    if is_call(value, aten.add.Tensor) and bind(value).alpha == 1:
        return [*_weights(bind(value).self), *_weights(bind(value).other)]
    if is_call(value, aten.linear.default) and bind(value).bias is None:
        return [_loaded(bind(value).weight)]
    if is_call(value, lora):
        return [_loaded(bind(value).b)]
    if is_call(value, rms_norm):
        return [_loaded(bind(value).weight)]
    return [_loaded(value)]


def _loaded(weight: fx.Node) -> fx.Node:
    if weight.op != "placeholder" or "recipe" not in weight.meta or len(weight.users) != 1:
        raise _Refused(f"{weight.name} is no loaded tensor of which it is the only reader")
    return weight
