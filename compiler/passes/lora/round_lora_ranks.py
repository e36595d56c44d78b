"""Rounding of the ranks of a decode step's LoRA branches, once instead of in every program of the expand."""

import torch
from torch import fx

from ....ops.lora.expand import lora_expand
from ....ops.lora.expand_rounded import fits, lora_expand_rounded, lora_round
from ....ops.lora.plan import rounded_splits
from ....ops.lora.shrink import lora_shrink
from ...graph.nodes import bind, calls, copy_marks, group_plan_of, insert_call, insert_picks, is_call, shape_of
from ..base import Context, PassReport, Refused, rewrite_each

WIDE = 8192  # a wide branch has more input or output features than this
WIDE_TOKENS, ALL_TOKENS = (8, 32), (65, 256)  # tokens for which wide branches, and all branches, are faster (H200)


def round_lora_ranks(graph: fx.Graph, context: Context) -> PassReport:
    """Sum and round a decode step's LoRA ranks in a launch of their own, not in every program of the expand.

    before  planes = lora_shrink(x, a, order, tiles, tile, 4)
            delta = lora_expand(planes, b, order, tiles, tile, [4096], bs)
    after   planes = lora_shrink(x, a, order, tiles, tile, 8); ranks, step = lora_round(planes, 1)
            delta = lora_expand_rounded(ranks, step, b, bs, order, tiles, tile, [4096])

    The expand then needs few registers, no shared memory and one short load, so it runs next to the projection; the
    shrink may compute more planes. For static sizes, with adapters in int8. Leaves sizes without a measured gain, sizes
    that the kernel does not support, branches of experts, and all branches with lora_lowering="serial" or
    "side_stream".
    """

    def rewrite(node: fx.Node) -> None:
        _check(node, context.options.lora_lowering)
        expand = bind(node)
        ranks, step = insert_rounded(graph, node)
        with graph.inserting_before(node):
            tiling = (expand.token_order, expand.tiles, expand.tile)
            operands = (ranks, step, expand.b, expand.b_scale, *tiling, expand.slices)
            delta = insert_call(graph, lora_expand_rounded, operands, like=node)
        copy_marks(node, delta)
        node.replace_all_uses_with(delta)

    return rewrite_each(calls(graph, lora_expand), rewrite)


def insert_rounded(graph: fx.Graph, expand: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Insert the rounding of `expand`'s planes on its lane, set the shrink's splits, and return (ranks, step)."""
    _split_for_rounding(graph, expand)
    with graph.inserting_before(expand):
        rounded = insert_call(graph, lora_round, (bind(expand).planes, len(bind(expand).slices)), like=expand)
        ranks, step = insert_picks(graph, rounded, (0, 1), like=expand)
    copy_marks(expand, rounded, ranks, step)
    return ranks, step


def _split_for_rounding(graph: fx.Graph, expand: fx.Node) -> None:
    """Set the shrink's number of splits to the best one if a separate op sums the planes."""
    shrink = bind(expand).planes
    if not is_call(shrink, lora_shrink) or len(shrink.users) != 1:
        return
    made = bind(shrink)
    tokens, features = shape_of(made.x)
    best = rounded_splits(int(features), int(shape_of(expand)[1]), int(tokens))
    if best != made.splits:
        with graph.inserting_before(shrink):
            tiling = (made.token_order, made.tiles, made.tile)
            operands = (made.x, made.a, *tiling, best, made.a_scale, made.x_scale)
            planes = insert_call(graph, lora_shrink, operands, like=shrink)
        copy_marks(shrink, planes)
        shrink.replace_all_uses_with(planes)


def _check(expand: fx.Node, lowering: str) -> None:
    planes, b = bind(expand).planes, bind(expand).b
    tokens, columns = shape_of(expand)
    features = shape_of(bind(planes).x)[1] if is_call(planes, lora_shrink) else 0
    if lowering != "auto":
        raise Refused(f"lora_lowering is {lowering}")
    if group_plan_of(expand) is not None:
        raise Refused("it is a branch of experts")
    if b.meta["val"].dtype != torch.int8:
        raise Refused(f"its adapters are {b.meta['val'].dtype}; the kernel supports only torch.int8")
    wide = max(features, columns) > WIDE
    if not (wide and WIDE_TOKENS[0] <= tokens <= WIDE_TOKENS[1]) and not ALL_TOKENS[0] <= tokens <= ALL_TOKENS[1]:
        ranges = (
            f"from {ALL_TOKENS[0]} to {ALL_TOKENS[1]}, branches of more than {WIDE} features from "
            f"{WIDE_TOKENS[0]} to {WIDE_TOKENS[1]} too"
        )
        raise Refused(f"{tokens} tokens, {features} to {columns} features: faster {ranges}")
    reason = fits(int(shape_of(b)[2]))
    if reason:
        raise Refused(reason)
