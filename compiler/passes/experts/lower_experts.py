"""Linears of experts -> a plan of the pairs and grouped linears."""

from collections.abc import Callable

from torch import fx

from ....ops.moe.expert_linear import expert_linear, expert_linear_8bit
from ....ops.moe.grouped_linear import expert_tile, grouped_linear, grouped_linear_8bit
from ....ops.moe.plan import group_plan
from ...graph.nodes import aten, bind, calls, insert_call, insert_picks, is_call, operands_for, shape_of
from ..base import Context, PassReport, rewrite_each

REPRESENTATIVE_PAIRS = 512


def lower_experts(graph: fx.Graph, context: Context) -> PassReport:
    """Lower each linear of a layer's experts to a grouped linear, with one plan per layer that groups pairs by expert.

    before  y = sidestream.expert_linear_8bit(q, scale, weight, weight_scale, experts, 8, torch.bfloat16)
    after   order, tiles = sidestream.group_plan(experts.view(-1), 128, tile)      # once per layer
            y = sidestream.grouped_linear_8bit(q, scale, weight, weight_scale, None, order, tiles, tile, 8, ...)

    A pair is a token and one of its experts. With a symbolic token count, specialization sets the tile.
    """
    plans: dict[fx.Node, tuple[fx.Node, fx.Node, int]] = {}

    def lower(node: fx.Node) -> None:
        experts, count = bind(node).experts, int(shape_of(bind(node).weight)[0])
        if experts not in plans:
            with graph.inserting_after(experts):
                pairs = insert_call(graph, aten.view.default, (experts, [-1]), like=node)
            plans[experts] = insert_plan(graph, pairs, count)
        order, tiles, tile = plans[experts]
        op = grouped_linear_8bit if is_call(node, expert_linear_8bit) else grouped_linear
        with graph.inserting_before(node):
            operands = operands_for(node, op, delta=None, order=order, tiles=tiles, tile=tile)
            node.replace_all_uses_with(insert_call(graph, op, operands, like=node))

    return rewrite_each(calls(graph, expert_linear, expert_linear_8bit), lower)


def insert_plan(
    graph: fx.Graph, groups: fx.Node, count: int, tile_of: Callable[[int, int], int] = expert_tile
) -> tuple[fx.Node, fx.Node, int]:
    """Insert the plan of pairs in `count` groups after the node `groups`; return (order, tiles, tile)."""
    pairs = shape_of(groups)[0]
    tile = tile_of(pairs if isinstance(pairs, int) else REPRESENTATIVE_PAIRS, count)
    with graph.inserting_after(groups):
        plan = insert_call(graph, group_plan, (groups, count, tile), like=groups)
    with graph.inserting_after(plan):
        tiles, order = insert_picks(graph, plan, (1, 0), like=plan)
    return order, tiles, tile
