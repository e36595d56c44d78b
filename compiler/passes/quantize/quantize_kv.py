"""A quantized KV cache, and attention over it."""

import torch
from torch import fx

from ....ops.attention.append_kv import append_kv
from ....ops.attention.paged_attention import paged_attention
from ....ops.core.kv_layout import PAGE_SIZE
from ....ops.elementwise.hadamard import hadamard
from ...graph.layer_names import layer_of_name
from ...graph.nodes import bind, calls, insert_call, insert_placeholder, is_call, set_operands, shape_of
from ..base import Context, PassReport, Refused, rewrite_each


def quantize_kv(graph: fx.Graph, context: Context) -> PassReport:
    """Quantize each layer's KV cache to e4m3 or int8, one fp32 scale per token, head and K or V.

    before  append_kv = sidestream.append_kv(k, v, kv_cache, None, slot_mapping)
            o = sidestream.paged_attention(q, kv_cache, None, ...)
    after   append_kv = sidestream.append_kv(sidestream.hadamard(k), v, kv_cache, kv_scales, slot_mapping)
            o = sidestream.paged_attention(sidestream.hadamard(q), kv_cache, kv_scales, ..., quantize_q=True)

    Q and K are rotated in layers in `hadamard`; the rotation is orthogonal, so scores are unchanged. With e4m3, prefill
    computes QK^T in FP8; PV is computed in 16 bits, to which the kernel converts V. Leaves caches with other readers.
    """
    options = context.options
    if not options.quantizes_kv:
        return PassReport(0)

    def quantize(append: fx.Node) -> None:
        key, cache = bind(append).k, bind(append).kv_cache
        readers = [user for user in cache.users if user is not append]
        if cache.op != "placeholder" or len(readers) != 1 or not is_call(readers[0], paged_attention):
            raise Refused(f"{cache.name} is not an input that one paged_attention reads")
        attention = readers[0]
        pages, heads = shape_of(cache)[:2]
        name, shape = cache.name.replace("kv_caches", "kv_scales"), (pages, heads, 2, PAGE_SIZE)
        scales = insert_placeholder(graph, name, "input", shape, torch.float32, after=cache)
        cache.meta["val"] = cache.meta["val"].to(options.cache_dtype)
        query = bind(attention).q
        if options.applies("hadamard", layer_of_name(cache.name)):
            with graph.inserting_before(append):
                key = insert_call(graph, hadamard, (key,), like=append)
            with graph.inserting_before(attention):
                query = insert_call(graph, hadamard, (query,), like=attention)
        set_operands(append, k=key, kv_scales=scales)
        set_operands(attention, q=query, kv_scales=scales, quantize_q=True)

    return rewrite_each(calls(graph, append_kv), quantize)


def is_rotated(key: fx.Node) -> bool:
    """Return whether an append's keys are rotated by the Hadamard transform."""
    return is_call(key, hadamard)
