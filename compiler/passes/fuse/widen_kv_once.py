"""Conversion of a prompt step's keys and values to fp16, once per layer instead of in every tile of queries."""

import torch
from torch import fx

from ....ops.attention.paged_attention import paged_attention, paged_attention_quant
from ....ops.attention.prefill_gluon import takes_heads, tile_tokens
from ....ops.attention.widen_kv import STEP_TOKENS, widen_kv, widen_plan
from ....ops.core.kv_layout import PAGE_SIZE
from ....ops.core.triton_support import cdiv
from ...graph.nodes import bind, calls, insert_call, insert_picks, set_operands, shape_of
from ..base import Context, PassReport, Refused, rewrite_each

FEWEST_TOKENS = 257  # with fewer no sequence has many tiles
# 256 MB with 8 KV heads; the arena does not grow if the activations of linears need as much
MOST_STEPS = 65536 // STEP_TOKENS


def widen_kv_once(graph: fx.Graph, context: Context) -> PassReport:
    """Convert the int8 pages of sequences with many queries to fp16 once before each attention, not in every tile.

    before  y = paged_attention(q, kv_cache, kv_scales, block_table, context_lens, query_start, ...)
    after   plan, pages = widen_plan(block_table, context_lens, query_start, tile, steps)  (once per step)
            wide = widen_kv(kv_cache, kv_scales, pages)
            y = paged_attention(q, kv_cache, kv_scales, block_table, context_lens, query_start, ..., wide, plan)

    The values are unchanged. All layers share a buffer of 65,536 tokens (or the most that the block table addresses);
    the GPU selects the sequences that use it. For static sizes of many tokens, also for paged_attention_quant. Leaves
    caches that are not int8, windows, and heads without a Gluon kernel for chunks.
    """
    plans: dict[tuple[object, ...], tuple[fx.Node, ...]] = {}

    def widen(node: fx.Node) -> None:
        _check(node)
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

    return rewrite_each(calls(graph, paged_attention, paged_attention_quant), widen)


def _check(node: fx.Node) -> None:
    attention = bind(node)
    cache = attention.kv_cache
    tokens, heads, dim = shape_of(attention.q)
    if attention.decode:
        raise Refused("one token per sequence")
    if attention.window:
        raise Refused(f"its window has {attention.window} tokens, so few tiles read the same ones")
    if cache.meta["val"].dtype != torch.int8:
        raise Refused(f"its cache is {cache.meta['val'].dtype}")
    if not takes_heads(int(heads), int(shape_of(cache)[1]), int(dim)):
        raise Refused(f"no Gluon kernel for chunks supports {heads} heads of {dim} on {shape_of(cache)[1]} KV heads")
    if tokens < FEWEST_TOKENS:
        raise Refused(f"{tokens} tokens: faster from {FEWEST_TOKENS} on")
