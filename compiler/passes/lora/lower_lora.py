"""LoRA -> plan, shrink, expand, marked for the side stream."""

from torch import fx

from ....ops.lora.expand import lora_expand
from ....ops.lora.lora import lora
from ....ops.lora.plan import lora_plan, lora_splits, lora_tile
from ....ops.lora.shrink import lora_shrink
from ...graph.nodes import bind, insert_call, insert_picks, is_call, shape_of
from ..base import Context, PassReport

REPRESENTATIVE_TOKENS = 64


def lower_lora(graph: fx.Graph, context: Context) -> PassReport:
    """Two kernels a branch, and one plan a step that groups the tokens by adapter.

    before  lora = sidestream.lora(x, a, b, adapter_index, [4096])
    after   token_order, tiles = sidestream.lora_plan(adapter_index, 8, tile)      # once a step
            planes = sidestream.lora_shrink(x, a, token_order, tiles, tile, splits)
            delta = sidestream.lora_expand(planes, b, token_order, tiles, tile, [4096])

    Every node of the three carries meta["stream"] = "side", and meta["sm_share"] where the options name a share; the
    schedule of each bucket decides what becomes of the marks. Tile and split counts depend on the token count: where
    that is symbolic, the bucket's specialisation fills them in. Matches every LoRA branch, and leaves none.
    """
    plans: dict[tuple[fx.Node, int], tuple[fx.Node, fx.Node]] = {}
    matches = 0
    for node in list(graph.nodes):
        if not is_call(node, lora):
            continue
        branch = bind(node)
        x, index = branch.x, branch.adapter_index
        key = (index, int(shape_of(branch.a)[0]))
        tokens = shape_of(x)[0]
        tokens = tokens if isinstance(tokens, int) else REPRESENTATIVE_TOKENS
        tile = lora_tile(tokens)
        with graph.inserting_before(node):
            if key not in plans:
                with (
                    graph.inserting_after(index)
                    if index.op != "placeholder"
                    else graph.inserting_before(_first_call(graph))
                ):
                    plan = insert_call(graph, lora_plan, (index, key[1], tile), like=node)
                with graph.inserting_after(plan):
                    tiles, order = insert_picks(graph, plan, (1, 0), like=node)
                plans[key] = (order, tiles)
                _mark(context, plan, order, tiles)
            order, tiles = plans[key]
            splits = lora_splits(int(shape_of(x)[-1]), tokens)
            shrink = (x, branch.a, order, tiles, tile, splits, branch.a_scale, branch.x_scale)
            planes = insert_call(graph, lora_shrink, shrink, like=node)
            expand = (planes, branch.b, order, tiles, tile, list(branch.slices), branch.b_scale)
            delta = insert_call(graph, lora_expand, expand, like=node)
        _mark(context, planes, delta)
        node.replace_all_uses_with(delta)
        matches += 1
    return PassReport(matches)


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _mark(context: Context, *nodes: fx.Node) -> None:
    for node in nodes:
        node.meta["stream"] = "side"
        if context.options.lora_sm_share is not None:
            node.meta["sm_share"] = context.options.lora_sm_share
