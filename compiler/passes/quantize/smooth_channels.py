"""Equal magnitudes of the channels after norms and SiLU * mul, before they are quantized."""

from functools import partial
from typing import Any

from torch import fx

from ....ops.elementwise.rms_norm import rms_norm
from ....ops.lora.lora import lora
from ...graph.matcher import find
from ...graph.nodes import (
    RESHAPES,
    aten,
    bind,
    calls,
    insert_placeholder,
    is_call,
    set_operands,
    shape_of,
    through_views,
)
from ...graph.projections import producing_weights, reading_weights
from ...graph.recipe import calibrated, smooth
from ..base import Context, PassReport, Refused, rewrite_each
from ..fuse.fuse_silu_mul import GATED

SUFFIX = "channel_exponents"


def channel_exponents_name(weight: str) -> str:
    """Return the recipe name of calibrated exponents (integers [K]): `weight` is a norm's, or SiLU * mul's reader's."""
    return f"{weight.removesuffix('.weight')}.{SUFFIX}"


def smooth_channels(graph: fx.Graph, context: Context) -> PassReport:
    """Divide the channels after norms and SiLU * mul by calibrated powers of two, and multiply their readers' weights.

    before  y = rms_norm(x, gain); q = aten.linear(y, W_q) + lora(y, a_q, b_q, ...); k = aten.linear(y, W_k); ...
            h = aten.silu(gate) * (aten.linear(z, W_up) + lora(z, a_up, b_up, ...)); aten.linear(h, W_down) + lora(...)
    after   the same graph; gain's recipe divides its channels, those of W_q, W_k, ... and a_q multiply their columns;
            the recipes of W_up and b_up divide their rows, those of W_down and a_down multiply their columns

    A channel that is large at every token determines the quantization step of all channels; in the weights, with one
    step per row, it does less harm (SmoothQuant, arXiv 2211.10438). Powers of two keep mantissas, so only the rounding
    of quantizers changes, at no cost at run time. A head that shares its weight with the embedding gets a weight of its
    own. Runs in int8 mode with `smooth_channels`. Leaves norms with readers other than linears and LoRA branches with
    loaded weights, the last norm with `lm_head="bf16"`, and MLPs with another producer of `up` or another reader of the
    product.
    """
    options = context.options
    if not options.smooth_channels or options.precision != "int8":
        return PassReport(0)
    norms = list(calls(graph, rms_norm))
    smoothed = norms[:-1] if options.lm_head == "bf16" else norms
    report = rewrite_each(smoothed, partial(_smooth, graph))
    matches, missed = find(graph, GATED, anchor=aten.silu.default)
    ups = {match.root: match["up"] for match in matches}
    products = rewrite_each(ups, lambda product: _smooth_product(product, ups[product]))
    return PassReport(report.matches + products.matches, [*report.rejected, *missed, *products.rejected])


def _smooth(graph: fx.Graph, norm: fx.Node) -> None:
    gain = bind(norm).weight
    names = gain.meta["recipe"].sources() if gain.op == "placeholder" and "recipe" in gain.meta else ()
    if len(names) != 1 or len(gain.users) != 1:
        raise Refused(f"{gain.name} is not a loaded weight of only this norm")
    exponents = calibrated(channel_exponents_name(*names), tuple(int(size) for size in shape_of(gain)))
    readers = _readers(norm)
    for reader, name in readers:
        weight = getattr(bind(reader), name)
        if weight.op != "placeholder" or "recipe" not in weight.meta:
            raise Refused(f"{weight.name}, which {reader.name} reads, is computed in the graph, not loaded")
        if weight.meta["recipe"].op == "dequantize":
            raise Refused(f"{weight.name} is stored in eight bits; smoothing would round it again")
    gain.meta["recipe"] = smooth(gain.meta["recipe"], exponents, -1, 0)
    for reader, name in readers:
        weight = getattr(bind(reader), name)
        recipe = smooth(weight.meta["recipe"], exponents, 1, len(shape_of(weight)) - 1)
        if len(weight.users) == 1:
            weight.meta["recipe"] = recipe
            continue
        value = weight.meta["val"]  # the embedding reads it too
        own = insert_placeholder(
            graph, f"{weight.name}_smoothed", weight.meta["kind"], value.shape, value.dtype, after=weight, recipe=recipe
        )
        set_operands(reader, **{name: own})


def _smooth_product(product: fx.Node, up: fx.Node) -> None:
    """Smooth SiLU * mul by dividing `up`, which divides the product."""
    makers, readers = producing_weights(through_views(up), "smoothed"), reading_weights(product, "smoothed")
    weights = [weight for weight, dim in readers if dim == 1]
    names = weights[0].meta["recipe"].sources() if len(weights) == 1 else ()
    if len(names) != 1:
        raise Refused(f"{product.name} is read by {len(weights)} linears with loaded weights instead of one")
    exponents = calibrated(channel_exponents_name(*names), (int(shape_of(product)[-1]),))
    for sign, found in ((-1, makers), (1, readers)):
        for weight, dim in found:
            weight.meta["recipe"] = smooth(weight.meta["recipe"], exponents, sign, dim)


def _readers(norm: fx.Node) -> list[tuple[fx.Node, str]]:
    """Return the readers of a norm's result, each with the name of its weight argument."""
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
                raise Refused(f"{user.name} reads it, but is not a linear or a LoRA branch (is lift_lora off?)")
    return found


def _keeps_channels(user: fx.Node, value: Any) -> bool:
    """Return whether a node only reshapes or selects rows."""
    if is_call(user, aten.index_select.default):
        return bind(user).dim in (0, -len(shape_of(value)))
    return user.op == "call_function" and user.target in RESHAPES and shape_of(user)[-1] == shape_of(value)[-1]
