"""Rotary position embedding -> `sidestream.rope`; its cosines and sines -> `sidestream.rope_angles`."""

from torch import fx

from ....ops.attention.rope import rope, rope_angles
from ...graph.matcher import Match, any_, call, cast, find
from ...graph.nodes import aten, bind, insert_call, insert_picks, is_call, shape_of, slice_range
from ..base import Context, PassReport

_wide = cast(any_("x"))
_rotated = call(aten.cat.default, [call(aten.neg.default, any_("upper")), any_("lower")], -1)
ROPE = _wide * any_("cos") + _rotated * any_("sin")


def lift_rope(graph: fx.Graph, context: Context) -> PassReport:
    """Replace the rotate-half form x * cos + cat(-x[d/2:], x[:d/2]) * sin, with its casts.

    before  neg = aten.neg(x[..., 32:]); cat = aten.cat([neg, x[..., :32]], -1)
            mul = x * cos; mul_1 = cat * sin; add = mul + mul_1
    after   rope = sidestream.rope(x, cos, sin)

    Leaves interleaved forms, and halves that are not the two halves of x.
    """

    def where(match: Match) -> str | None:
        lower, upper = slice_range(match["lower"]), slice_range(match["upper"])
        if lower is None or upper is None:
            return f"{match['lower'].name} and {match['upper'].name} are not slices of the last dimension"
        width = int(shape_of(match["x"])[-1])
        sources = {lower[0], upper[0]}
        if lower[1:] != (0, width // 2) or upper[1:] != (width // 2, width) or len(sources) > 1:
            return f"{match['lower'].name} and {match['upper'].name} are not the two halves of {match['x'].name}"
        if sources <= {match["x"], *match.nodes}:
            return None
        return f"the halves are of {lower[0].name}, not of {match['x'].name}"

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
    """Return the cast back to x's dtype if it is the only reader of the sum, else the sum."""
    users = list(root.users)
    if len(users) == 1 and users[0].target is aten.to.dtype and users[0].meta["val"].dtype == x.meta["val"].dtype:
        return users[0]
    return root


_angle = call(aten.unsqueeze.default, cast(any_("positions")), -1) * any_("inv_freq")
COSINE = call(aten.cos.default, call(aten.unsqueeze.default, call(aten.cat.default, [_angle, _angle], -1), 1))


def lift_rope_angles(graph: fx.Graph, context: Context) -> PassReport:
    """Replace the table of angles, which has one row per token and is read by all layers.

    before  mul = positions.float().unsqueeze(-1) * inv_freq; cat = aten.cat([mul, mul], -1).unsqueeze(1)
            cos = aten.cos(cat); sin = aten.sin(cat)
    after   cos, sin = sidestream.rope_angles(positions, inv_freq)

    Leaves tables of batched positions (transformers) and of scaled cosines.
    """

    def where(match: Match) -> str | None:
        if len(shape_of(match["positions"])) != 1:
            return f"{match['positions'].name} has {len(shape_of(match['positions']))} dimensions, not one"
        return None if _sine(match.root) is not None else f"{match.root.name} has no sine of the same angles"

    matches, rejected = find(graph, COSINE, anchor=aten.cos.default, where=where)
    for match in matches:
        cosine, sine = match.root, _sine(match.root)
        with graph.inserting_before(cosine):
            table = insert_call(graph, rope_angles, (match["positions"], match["inv_freq"]), like=cosine)
            picked = insert_picks(graph, table, (0, 1), like=cosine)
        cosine.replace_all_uses_with(picked[0])
        if sine is not None:
            sine.replace_all_uses_with(picked[1])
    return PassReport(len(matches), rejected)


def _sine(cosine: fx.Node) -> fx.Node | None:
    """Return the sine of the same angles; None without one."""
    return next((user for user in bind(cosine).self.users if is_call(user, aten.sin.default)), None)
