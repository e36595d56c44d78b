"""Rotary position embedding -> `sidestream.rope`."""

from torch import fx

from ....ops.attention.rope import rope
from ...graph.matcher import Match, any_, call, cast, find
from ...graph.nodes import aten, insert_call, shape_of, slice_range
from ..base import Context, PassReport

_wide = cast(any_("x"))
_rotated = call(aten.cat.default, [call(aten.neg.default, any_("upper")), any_("lower")], -1)
ROPE = _wide * any_("cos") + _rotated * any_("sin")


def lift_rope(graph: fx.Graph, context: Context) -> PassReport:
    """The rotate-half form: x * cos + cat(-x[d/2:], x[:d/2]) * sin; with the casts around it where the model has some.

    before  neg = aten.neg(x[..., 32:]); cat = aten.cat([neg, x[..., :32]], -1)
            mul = x * cos; mul_1 = cat * sin; add = mul + mul_1
    after   rope = sidestream.rope(x, cos, sin)

    Matches at a negation. Leaves interleaved forms and halves that are not the two halves of x.
    """

    def where(match: Match) -> str | None:
        lower, upper = slice_range(match["lower"]), slice_range(match["upper"])
        if lower is None or upper is None:
            return f"{match['lower'].name} and {match['upper'].name} are not slices of the last dimension"
        width = int(shape_of(match["x"])[-1])
        sources = {lower[0], upper[0]}
        if lower[1:] != (0, width // 2) or upper[1:] != (width // 2, width) or len(sources) > 1:
            return f"{match['lower'].name} and {match['upper'].name} are not the two halves of {match['x'].name}"
        return (
            None
            if sources <= {match["x"], *match.nodes}
            else f"the halves are of {lower[0].name}, not of {match['x'].name}"
        )

    matches, rejected = find(graph, ROPE, anchor=aten.neg.default, where=where)
    for match in matches:
        root = match.root
        x = match["x"]
        last = _narrowing_cast(root, x)
        with graph.inserting_before(last):
            new = insert_call(graph, rope, (x, match["cos"], match["sin"]), like=root)
            if new.meta["val"].dtype != last.meta["val"].dtype:
                new = insert_call(graph, aten.to.dtype, (new, last.meta["val"].dtype), like=root)
        last.replace_all_uses_with(new)
    return PassReport(len(matches), rejected)


def _narrowing_cast(root: fx.Node, x: fx.Node) -> fx.Node:
    """The cast back to x's dtype that follows the sum, when that is its only use; else the sum itself."""
    users = list(root.users)
    if len(users) == 1 and users[0].target is aten.to.dtype and users[0].meta["val"].dtype == x.meta["val"].dtype:
        return users[0]
    return root
