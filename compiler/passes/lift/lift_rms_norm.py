"""RMS norm -> `sidestream.rms_norm`."""

from torch import fx

from ....ops.elementwise.rms_norm import rms_norm
from ...graph.matcher import Match, any_, call, cast, const, find
from ...graph.nodes import aten, insert_call, shape_of
from ..base import Context, PassReport

_wide = cast(any_("x"))
_mean = call(aten.mean.dim, call(aten.pow.Tensor_Scalar, _wide, 2), [-1], True)
RMS_NORM = any_("weight") * cast(_wide * call(aten.rsqrt.default, _mean + const("eps")))


def lift_rms_norm(graph: fx.Graph, context: Context) -> PassReport:
    """Replace Llama's norm, computed in fp32 and rounded before the weight is applied.

    before  pow_1 = aten.pow.Tensor_Scalar(x, 2); mean = aten.mean.dim(pow_1, [-1], True); add = mean + 1e-05
            rsqrt = aten.rsqrt(add); mul = x * rsqrt; mul_1 = weight * mul
    after   rms_norm = sidestream.rms_norm(x, weight, 1e-05)

    The norm is weight * (x * rsqrt(mean(x ** 2) + eps)).to(dtype). Leaves weights that are not a vector over the last
    dimension, and inner values with other readers.
    """

    def where(match: Match) -> str | None:
        weight, x = shape_of(match["weight"]), shape_of(match["x"])
        if len(weight) == 1 and weight[0] == x[-1]:
            return None
        return f"{match['weight'].name} is not a vector over the last dimension of {match['x'].name}"

    matches, rejected = find(graph, RMS_NORM, anchor=aten.rsqrt.default, where=where)
    for match in matches:
        with graph.inserting_before(match.root):
            new = insert_call(graph, rms_norm, (match["x"], match["weight"], float(match["eps"])), like=match.root)
        match.root.replace_all_uses_with(new)
    return PassReport(len(matches), rejected)
