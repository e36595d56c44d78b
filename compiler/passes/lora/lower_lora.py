"""LoRA -> plan, shrink and expand, marked for the side stream."""

from torch import fx

from ....ops.lora.expand import lora_expand
from ....ops.lora.lora import lora
from ....ops.lora.plan import lora_plan, lora_splits, lora_tile
from ....ops.lora.shrink import lora_shrink
from ...graph.nodes import bind, calls, insert_call, insert_picks, shape_of
from ..base import Context, PassReport, rewrite_each

REPRESENTATIVE_TOKENS = 64


def lower_lora(graph: fx.Graph, context: Context) -> PassReport:
    """Lower each LoRA branch to shrink and expand, with one plan per step that groups tokens by adapter.

    before  lora = sidestream.lora(x, a, b, adapter_index, [4096])
    after   token_order, tiles = sidestream.lora_plan(adapter_index, 8, tile)      # once per step
            planes = sidestream.lora_shrink(x, a, token_order, tiles, tile, splits)
            delta = sidestream.lora_expand(planes, b, token_order, tiles, tile, [4096])

    The three are marked with meta["stream"] = "side", and with meta["sm_share"] if the options have one; each bucket's
    schedule decides their lane. With a symbolic token count, specialization sets tile and splits.
    """
    plans: dict[tuple[fx.Node, int], tuple[fx.Node, fx.Node]] = {}

    def lower(node: fx.Node) -> None:
        branch = bind(node)
        x, index = branch.x, branch.adapter_index
        key = (index, int(shape_of(branch.a)[0]))
        tokens = shape_of(x)[0]
        tokens = tokens if isinstance(tokens, int) else REPRESENTATIVE_TOKENS
        tile = lora_tile(tokens)
        if key not in plans:
            first = next(each for each in graph.nodes if each.op != "placeholder")
            computed = index.op != "placeholder"
            with graph.inserting_after(index) if computed else graph.inserting_before(first):
                plan = insert_call(graph, lora_plan, (index, key[1], tile), like=node)
            with graph.inserting_after(plan):
                tiles, order = insert_picks(graph, plan, (1, 0), like=node)
            plans[key] = (order, tiles)
            _mark(context, plan, order, tiles)
        order, tiles = plans[key]
        with graph.inserting_before(node):
            splits = lora_splits(int(shape_of(x)[-1]), tokens)
            shrink = (x, branch.a, order, tiles, tile, splits, branch.a_scale, branch.x_scale)
            planes = insert_call(graph, lora_shrink, shrink, like=node)
            expand = (planes, branch.b, order, tiles, tile, list(branch.slices), branch.b_scale)
            delta = insert_call(graph, lora_expand, expand, like=node)
        _mark(context, planes, delta)
        node.replace_all_uses_with(delta)

    return rewrite_each(calls(graph, lora), lower)


def _mark(context: Context, *nodes: fx.Node) -> None:
    for node in nodes:
        node.meta["stream"] = "side"
        if context.options.lora_sm_share is not None:
            node.meta["sm_share"] = context.options.lora_sm_share
