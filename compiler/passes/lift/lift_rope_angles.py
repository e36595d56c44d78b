"""cos and sin of the rotary angles -> `sidestream.rope_angles`."""

from torch import fx

from ....ops.attention.rope import rope_angles
from ...graph.matcher import Match, any_, call, cast, find
from ...graph.nodes import aten, bind, insert_call, insert_picks, is_call, shape_of
from ..base import Context, PassReport

_angle = call(aten.unsqueeze.default, cast(any_("positions")), -1) * any_("inv_freq")
COSINE = call(aten.cos.default, call(aten.unsqueeze.default, call(aten.cat.default, [_angle, _angle], -1), 1))


def lift_rope_angles(graph: fx.Graph, context: Context) -> PassReport:
    """The table of angles that all layers read, one row a token.

    before  mul = positions.float().unsqueeze(-1) * inv_freq; cat = aten.cat([mul, mul], -1).unsqueeze(1)
            cos = aten.cos(cat); sin = aten.sin(cat)
    after   cos, sin = sidestream.rope_angles(positions, inv_freq)

    Matches flattened positions [T]. Leaves tables of batched positions (transformers') and of scaled cosines.
    """

    def where(match: Match) -> str | None:
        if len(shape_of(match["positions"])) != 1:
            return f"{match['positions'].name} has {len(shape_of(match['positions']))} dimensions, not one"
        return None if _sine(match.root) is not None else f"{match.root.name} comes without a sine of the same angles"

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
    """The sine of the same angles."""
    return next((user for user in bind(cosine).self.users if is_call(user, aten.sin.default)), None)
