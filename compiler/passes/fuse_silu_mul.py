"""silu(gate) * up over a packed projection -> `sidestream.silu_mul`."""
from torch import fx

from ...ops.silu_mul import silu_mul
from ..matcher import Match, any_, call, find
from ..nodes import args_of, aten, insert_call, shape_of, slice_range
from .base import Context, PassReport
from .joins import split_delta

GATED = call(aten.silu.default, any_("gate")) * any_("up")


def fuse_silu_mul(graph: fx.Graph, context: Context) -> PassReport:
    """The MLP's gate, with the LoRA delta of the packed projection added inside.

    before  add = linear + lora; silu = aten.silu(add[..., :14336]); mul = silu * add[..., 14336:]
    after   silu_mul = sidestream.silu_mul(linear, lora)

    Leaves gates whose two inputs are not the two halves of one tensor (pack_projections makes them so).
    """
    def where(match: Match) -> str | None:
        gate, up = slice_range(match["gate"]), slice_range(match["up"])
        if gate is None or up is None or gate[0] is not up[0]:
            return f"{match['gate'].name} and {match['up'].name} are not slices of one packed projection"
        width = int(shape_of(gate[0])[-1])
        return None if (gate[1:], up[1:]) == ((0, width // 2), (width // 2, width)) else "gate and up are not its first and second half"

    matches, rejected = find(graph, GATED, anchor=aten.silu.default, where=where)
    for match in matches:
        packed, delta = split_delta(args_of(match["gate"])[0])
        with graph.inserting_before(match.root):
            new = insert_call(graph, silu_mul, (packed, delta), like=match.root)
        match.root.replace_all_uses_with(new)
    return PassReport(len(matches), rejected)
