"""A quantized KV cache, and hybrid attention over it."""

import torch
from torch import fx

from ....ops.attention.append_kv import append_kv
from ....ops.attention.paged_attention import paged_attention
from ....ops.core.kv_layout import PAGE_SIZE
from ....ops.elementwise.hadamard import hadamard
from ...graph.nodes import bind, insert_call, insert_placeholder, is_call, set_operands, shape_of
from ...program.layers import layer_of_name
from ..base import Context, PassReport


def quantize_kv(graph: fx.Graph, context: Context) -> PassReport:
    """Each layer's cache holds e4m3 or int8 with one fp32 scale per token, head and K or V; Q and K are rotated alike
    beforehand.

    before  append_kv = sidestream.append_kv(k, v, kv_cache, None, slot_mapping)
            o = sidestream.paged_attention(q, kv_cache, None, ...)
    after   append_kv = sidestream.append_kv(sidestream.hadamard(k), v, kv_cache, kv_scales, slot_mapping)
            o = sidestream.paged_attention(sidestream.hadamard(q), kv_cache, kv_scales, ..., quantize_q=True)

    The rotation leaves every score as it was (it is orthogonal) and is left out in layers without `hadamard`. With e4m3
    the attention is hybrid: QK^T in FP8 in prefill, V upcast inside the kernel, PV in 16-bit. Leaves caches that
    something else reads too.
    """
    report = PassReport(0)
    options = context.options
    if not options.quantizes_kv:
        return report
    for append in list(graph.nodes):
        if not is_call(append, append_kv):
            continue
        key, cache = bind(append).k, bind(append).kv_cache
        readers = [user for user in cache.users if user is not append]
        if cache.op != "placeholder" or len(readers) != 1 or not is_call(readers[0], paged_attention):
            report.rejected.append(f"{append.name}: {cache.name} is not an input that one paged_attention reads")
            continue
        attention = readers[0]
        pages, heads = shape_of(cache)[:2]
        scales = insert_placeholder(
            graph,
            cache.name.replace("kv_caches", "kv_scales"),
            "input",
            (pages, heads, 2, PAGE_SIZE),
            torch.float32,
            after=cache,
        )
        cache.meta["val"] = cache.meta["val"].to(options.cache_dtype)
        query = bind(attention).q
        if options.applies("hadamard", layer_of_name(cache.name)):
            with graph.inserting_before(append):
                key = insert_call(graph, hadamard, (key,), like=append)
            with graph.inserting_before(attention):
                query = insert_call(graph, hadamard, (query,), like=attention)
        set_operands(append, k=key, kv_scales=scales)
        set_operands(attention, q=query, kv_scales=scales, quantize_q=True)
        report.matches += 1
    return report


def is_rotated(key: fx.Node) -> bool:
    """Whether the keys of an append went through the Hadamard transform."""
    return is_call(key, hadamard)
