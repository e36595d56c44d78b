"""A prompt step's keys and values become fp16 once, not in every tile of queries that reads them."""

import torch
from torch import fx

from ....ops.attention.paged_attention import paged_attention, paged_attention_quant
from ....ops.attention.prefill_gluon import takes_heads, tile_tokens
from ....ops.attention.widen_kv import STEP_TOKENS, widen_kv, widen_plan
from ....ops.core.kv_layout import PAGE_SIZE
from ....ops.core.triton_support import cdiv
from ...graph.nodes import bind, insert_call, insert_picks, is_call, set_operands, shape_of
from ..base import Context, PassReport

FEWEST_TOKENS = 257  # of fewer no sequence has many tiles
# 256 MB with 8 KV heads, and no memory of its own where the linears' activations take as much
MOST_STEPS = 65536 // STEP_TOKENS


def widen_kv_once(graph: fx.Graph, context: Context) -> PassReport:
    """The pages of sequences with many queries are widened in front of each attention, into a buffer that all layers
    share.

    before  y = paged_attention(q, kv_cache, kv_scales, block_table, context_lens, query_start, ...)
    after   plan, pages = widen_plan(block_table, context_lens, query_start, tile, steps)  (once a step)
            wide = widen_kv(kv_cache, kv_scales, pages)
            y = paged_attention(q, kv_cache, kv_scales, block_table, context_lens, query_start, ..., wide, plan)

    The same bits. Sequences that are not worth it, and what the buffer has no room for, are served as before; the GPU
    decides. It holds 65,536 tokens, or what the block table reaches. For graphs with static sizes, of many tokens;
    paged_attention_quant alike. Matches attentions over such a cache. Leaves caches other than int8, windows, and
    heads for which chunks have no Gluon kernel.
    """
    report = PassReport(0)
    plans: dict[tuple[object, ...], tuple[fx.Node, ...]] = {}
    for node in list(graph.nodes):
        if not is_call(node, paged_attention, paged_attention_quant):
            continue
        reason = _stays(node)
        if reason is not None:
            report.rejected.append(f"{node.name}: {reason}")
            continue
        attention = bind(node)
        sequences, blocks = shape_of(attention.block_table)
        tile = tile_tokens(int(shape_of(attention.q)[1]), int(shape_of(attention.kv_cache)[1]))
        steps = min(MOST_STEPS, int(sequences) * cdiv(int(blocks), STEP_TOKENS // PAGE_SIZE))
        with graph.inserting_before(node):
            key = (attention.block_table, attention.context_lens, attention.query_start, tile, steps)
            if key not in plans:
                both = insert_call(graph, widen_plan, key, like=node)
                plans[key] = tuple(insert_picks(graph, both, (0, 1), like=node))
            plan, pages = plans[key]
            wide = insert_call(graph, widen_kv, (attention.kv_cache, attention.kv_scales, pages), like=node)
        set_operands(node, wide=wide, plan=plan)
        report.matches += 1
    return report


def _stays(node: fx.Node) -> str | None:
    """Why an attention reads its cache alone."""
    attention = bind(node)
    cache = attention.kv_cache
    tokens, heads, dim = shape_of(attention.q)
    if attention.decode:
        return "one token a sequence"
    if attention.window:
        return f"it sees {attention.window} tokens, of which few tiles read the same"
    if cache.meta["val"].dtype != torch.int8:
        return f"its cache is {cache.meta['val'].dtype}"
    if not takes_heads(int(heads), int(shape_of(cache)[1]), int(dim)):
        return f"{heads} heads of {dim} on {shape_of(cache)[1]} KV heads: no Gluon kernel for chunks takes them"
    if tokens < FEWEST_TOKENS:
        return f"{tokens} tokens: gains from {FEWEST_TOKENS} on"
    return None
