"""Channels of like size after a norm, before they are quantized."""

from typing import Any

from torch import fx

from ...ops.lora.lora import lora
from ...ops.rows.rms_norm import rms_norm
from ..graph.nodes import RESHAPES, aten, bind, insert_placeholder, is_call, set_operands, shape_of
from ..graph.recipe import calibrated, smooth
from .base import Context, PassReport

SUFFIX = "channel_exponents"


class _Refused(Exception):
    """Why a norm is left alone."""


def channel_exponents_name(gain: str) -> str:
    """The name under which recipes look for a norm's constant, told from its weight's name: whole numbers [H]."""
    return f"{gain.removesuffix('.weight')}.{SUFFIX}"


def smooth_channels(graph: fx.Graph, context: Context) -> PassReport:
    """What a norm makes is divided by a calibrated power of two in each channel, and multiplied by it where it is read.

    before  y = rms_norm(x, gain); q = aten.linear(y, W_q) + lora(y, a_q, b_q, ...); k = aten.linear(y, W_k); ...
    after   the same graph; gain's recipe divides its channels, those of W_q, W_k, ... and a_q multiply their columns

    A channel that is far larger than the others at every token sets the steps of all of them; divided, it leaves that
    to the weights, whose steps are set row by row (SmoothQuant, arXiv 2211.10438). Powers of two change no mantissa, so
    nothing but the quantizer sees them, and they cost nothing at run time. A head that shares its weight with the
    embedding gets a recipe of its own. Matches every norm in int8 mode with `smooth_channels`. Leaves norms that
    something else reads than linears and LoRA branches with loaded weights, and, with `lm_head="bf16"`, the last one.
    """
    report = PassReport(0)
    options = context.options
    if not options.smooth_channels or options.precision != "int8":
        return report
    norms = [node for node in graph.nodes if is_call(node, rms_norm)]
    for norm in norms:
        if norm is norms[-1] and options.lm_head == "bf16":
            continue
        try:
            _smooth(graph, norm)
            report.matches += 1
        except _Refused as refusal:
            report.rejected.append(f"{norm.name}: {refusal}")
    return report


def _smooth(graph: fx.Graph, norm: fx.Node) -> None:
    gain = bind(norm).weight
    names = gain.meta["recipe"].sources() if gain.op == "placeholder" and "recipe" in gain.meta else ()
    if len(names) != 1 or len(gain.users) != 1:
        raise _Refused(f"{gain.name} is no loaded weight of this norm alone")
    exponents = calibrated(channel_exponents_name(*names), tuple(int(size) for size in shape_of(gain)))
    readers = _readers(norm)
    for reader, name in readers:
        weight = getattr(bind(reader), name)
        if weight.op != "placeholder" or "recipe" not in weight.meta:
            raise _Refused(f"{weight.name}, which {reader.name} reads, is computed in the graph, not loaded")
        if weight.meta["recipe"].op == "dequantize":
            raise _Refused(f"{weight.name} is stored in eight bits, and smoothed it would be rounded again")
    gain.meta["recipe"] = smooth(gain.meta["recipe"], exponents, -1)
    for reader, name in readers:
        weight = getattr(bind(reader), name)
        recipe = smooth(weight.meta["recipe"], exponents, 1)
        if len(weight.users) == 1:
            weight.meta["recipe"] = recipe
            continue
        value = weight.meta["val"]  # the embedding reads it too
        own = insert_placeholder(
            graph, f"{weight.name}_smoothed", weight.meta["kind"], value.shape, value.dtype, after=weight, recipe=recipe
        )
        set_operands(reader, **{name: own})


def _readers(norm: fx.Node) -> list[tuple[fx.Node, str]]:
    """Who multiplies what a norm has made with weights, each with the argument whose columns these channels are."""
    found: list[tuple[fx.Node, str]] = []
    waiting = [norm]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if _keeps_channels(user, value):
                waiting.append(user)
            elif is_call(user, lora) and bind(user).x is value:
                found.append((user, "a"))
            elif is_call(user, aten.linear.default) and bind(user).input is value:
                found.append((user, "weight"))
            else:
                raise _Refused(f"{user.name} reads it and is neither a linear nor a LoRA branch (is lift_lora off?)")
    return found


def _keeps_channels(user: fx.Node, value: Any) -> bool:
    """Whether a node only reshapes or selects rows."""
    if is_call(user, aten.index_select.default):
        return bind(user).dim in (0, -len(shape_of(value)))
    return user.op == "call_function" and user.target in RESHAPES and shape_of(user)[-1] == shape_of(value)[-1]
