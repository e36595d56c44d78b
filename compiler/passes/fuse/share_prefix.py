"""Decode attention that reads pages of several sequences once, in buckets with `cascade`."""

from torch import fx

from ....ops.attention.paged_attention import paged_attention, paged_attention_quant, takes_prefix
from ....ops.attention.paged_attention_blocks import paged_attention_blocks
from ....ops.attention.prefill_gluon import tile_tokens
from ....ops.attention.prefix_attention import prefix_attention, prefix_plan
from ...graph.nodes import bind, calls, insert_call, insert_picks, last_placeholder, set_operands, shape_of
from ..base import Context, PassReport, Refused, rewrite_each


def share_prefix(graph: fx.Graph, context: Context) -> PassReport:
    """Attend to pages that sequences of a decode step share in one launch, and to the others in the next.

    before  y = paged_attention(q, kv_cache, kv_scales, block_table, context_lens, query_start, ...)
    after   plan = prefix_plan(block_table, context_lens, tile)  (once per step, before all other kernels)
            prefix, lse = prefix_attention(q, kv_cache, kv_scales, block_table, plan, softmax_scale)
            y = paged_attention(q, kv_cache, kv_scales, block_table, context_lens, query_start, ..., prefix, lse, plan)

    Also for paged_attention_quant and paged_attention_blocks. Leaves windows, and heads or caches without a kernel.
    """
    plans: dict[tuple[object, ...], fx.Node] = {}

    def share(node: fx.Node) -> None:
        _check(node)
        attention = bind(node)
        heads, kv_heads = int(shape_of(attention.q)[1]), int(shape_of(attention.kv_cache)[1])
        key = (attention.block_table, attention.context_lens, tile_tokens(heads, kv_heads))
        if key not in plans:
            with graph.inserting_after(last_placeholder(graph)):
                plans[key] = insert_call(graph, prefix_plan, key, like=node)
        own = (attention.q, attention.kv_cache, attention.kv_scales, attention.block_table)
        with graph.inserting_before(node):
            both = insert_call(graph, prefix_attention, (*own, plans[key], attention.softmax_scale), like=node)
            prefix, lse = insert_picks(graph, both, (0, 1), like=node)
        set_operands(node, prefix=prefix, prefix_lse=lse, prefix_plan=plans[key])

    return rewrite_each(calls(graph, paged_attention, paged_attention_quant, paged_attention_blocks), share)


def _check(node: fx.Node) -> None:
    attention = bind(node)
    if attention.window:
        raise Refused(f"its window has {attention.window} tokens")
    (_, heads, dim), cache = shape_of(attention.q), attention.kv_cache
    if not takes_prefix(int(heads), int(shape_of(cache)[1]), int(dim), cache.meta["val"].dtype):
        raise Refused(
            f"no kernel supports {heads} heads of {dim} on {shape_of(cache)[1]} KV heads over {cache.meta['val'].dtype}"
        )
    if any(each.op != "placeholder" for each in (attention.block_table, attention.context_lens)):
        raise Refused("its block table is computed in the step")
