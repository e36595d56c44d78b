"""LoRA -> plan, shrink and expand, marked for the side stream."""

from torch import fx

from ....ops.lora.expand import lora_expand
from ....ops.lora.lora import lora
from ....ops.lora.plan import lora_plan, lora_splits, lora_tile
from ....ops.lora.shrink import lora_shrink
from ....ops.moe.expert_lora import expert_lora, pair_tile
from ....ops.moe.plan import expert_groups
from ...graph.nodes import aten, bind, calls, insert_call, insert_picks, shape_of
from ..base import Context, PassReport, rewrite_each
from ..experts.lower_experts import REPRESENTATIVE_PAIRS, insert_plan

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

    report, of_experts = rewrite_each(calls(graph, lora), lower), _lower_experts(graph, context)
    return PassReport(report.matches + of_experts.matches, [*report.rejected, *of_experts.rejected])


def _lower_experts(graph: fx.Graph, context: Context) -> PassReport:
    """Lower LoRA on experts, with one plan per layer that groups pairs of a token and an expert.

    before  delta = sidestream.expert_lora(x, a, b, adapter_index, experts, [768, 768], 8)
    after   order, tiles = sidestream.group_plan(expert_groups(adapter_index, experts, 128), 4 * 128, tile)
            planes = sidestream.lora_shrink(x, a.flatten(0, 1), order, tiles, tile, splits, None, None, 8)
            delta = sidestream.lora_expand(planes, b.flatten(0, 1), order, tiles, tile, [768, 768])

    A group is an adapter's expert; the stacks [slots, experts, ...] are viewed as those of that many adapters.
    """
    plans: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node, int]] = {}

    def lower(node: fx.Node) -> None:
        branch = bind(node)
        key, (slots, experts) = (branch.adapter_index, branch.experts), map(int, shape_of(branch.a)[:2])
        if key not in plans:
            with graph.inserting_after(branch.experts):
                groups = insert_call(graph, expert_groups, (*key, experts), like=node)
            plans[key] = insert_plan(graph, groups, slots * experts, pair_tile)
            order, tiles, _ = plans[key]
            _mark(context, groups, bind(order).source, order, tiles)
        pairs = shape_of(node)[0]
        with graph.inserting_before(node):
            a, b, a_scale, b_scale = (
                None if stack is None else insert_call(graph, aten.flatten.using_ints, (stack, 0, 1), like=node)
                for stack in (branch.a, branch.b, branch.a_scale, branch.b_scale)
            )
            splits = lora_splits(int(shape_of(branch.x)[-1]), pairs if isinstance(pairs, int) else REPRESENTATIVE_PAIRS)
            shrink = (branch.x, a, *plans[key], splits, a_scale, branch.x_scale, branch.pairs_per_row)
            planes = insert_call(graph, lora_shrink, shrink, like=node)
            expand = (planes, b, *plans[key], list(branch.slices), b_scale)
            delta = insert_call(graph, lora_expand, expand, like=node)
        _mark(context, planes, delta)
        node.replace_all_uses_with(delta)

    return rewrite_each(calls(graph, expert_lora), lower)


def _mark(context: Context, *nodes: fx.Node) -> None:
    for node in nodes:
        node.meta["stream"] = "side"
        if context.options.lora_sm_share is not None:
            node.meta["sm_share"] = context.options.lora_sm_share
