"""RoPE -> Hadamard -> quantize -> KV append in one op."""

from dataclasses import dataclass

from torch import fx

from ....ops.attention.append_kv import append_kv
from ....ops.attention.paged_attention import paged_attention
from ....ops.attention.rope import rope
from ....ops.attention.rope_append import rope_append
from ....ops.elementwise.hadamard import hadamard
from ....ops.elementwise.rms_norm import rms_norm
from ...graph.nodes import (
    bind,
    calls,
    insert_call,
    insert_placeholder,
    is_call,
    shape_of,
    slice_range,
    split_bias,
    split_delta,
    through_views,
)
from ...graph.recipe import cat, unsqueeze
from ..base import Context, PassReport, Refused, rewrite_each


@dataclass
class _Heads:
    """Heads of q, k or v: their slice of the packed projection, their norm, and their rotation."""

    packed: fx.Node
    start: int
    end: int
    norm: fx.Node | None
    angles: tuple[fx.Node, fx.Node] | None
    transformed: bool


def fuse_rope_append(graph: fx.Graph, context: Context) -> PassReport:
    """Fuse RoPE, Hadamard, KV quantization and append into one op on the packed q/k/v row; add its LoRA delta there.

    before  q = hadamard(rope(qkv[:, :4096], cos, sin)); k = hadamard(rope(qkv[:, 4096:5120], cos, sin))
            append_kv(k, qkv[:, 5120:], kv_cache, kv_scales, slot_mapping); o = paged_attention(q, kv_cache, ...)
    after   q = sidestream.rope_append(linear, lora, cos, sin, kv_cache, kv_scales, slot_mapping, 32, 8, True)
            o = paged_attention(q, kv_cache, ...)

    The constant of center_keys, the projection's bias and the norms of q's and k's heads (Qwen3) become the op's last
    arguments. The op replaces the append at the same position of the graph, because that orders the mutation. Leaves
    appends unless q, k and v are the three parts of one packed projection, with equal norms and the same angles, if
    any.
    """

    def fuse(append: fx.Node) -> None:
        bound = bind(append)
        key, cache = bound.k, bound.kv_cache
        attention = next((user for user in cache.users if is_call(user, paged_attention)), None)
        if attention is None:
            raise Refused(f"no paged_attention reads {cache.name}")
        query = bind(attention).q
        q, k, v = (_heads(node) for node in (query, key, bound.v))
        _check(q, k, v)
        qkv, delta = split_delta(q.packed)
        qkv, bias = split_bias(qkv)
        heads, kv_heads = int(shape_of(query)[1]), int(shape_of(key)[1])
        norm = (_head_norm(graph, q.norm, k.norm), bind(q.norm).eps) if q.norm and k.norm else ()
        more = (bound.key_center, None, bias, *norm)
        while more and more[-1] is None:
            more = more[:-1]
        with graph.inserting_before(append):
            operands = (qkv, delta, *(q.angles or (None, None)), cache, bound.kv_scales, bound.slot_mapping)
            new = insert_call(graph, rope_append, (*operands, heads, kv_heads, q.transformed, *more), like=append)
        attention.replace_input_with(query, new)
        graph.erase_node(append)

    return rewrite_each(calls(graph, append_kv), fuse)


def _heads(node: fx.Node) -> _Heads:
    """Follow a head tensor back to its slice of the packed projection. Raises Refused."""
    transformed = is_call(node, hadamard)
    if transformed:
        node = bind(node).x
    angles = None
    if is_call(node, rope):
        angles = (bind(node).cos, bind(node).sin)
        node = bind(node).x
    norm = node if is_call(node, rms_norm) and _is_loaded(bind(node).weight) else None
    if norm is not None:
        node = bind(norm).x
    found = slice_range(through_views(node))
    if found is None:
        raise Refused("q, k and v are not slices of one packed projection (is pack_projections off?)")
    return _Heads(*found, norm, angles, transformed)


def _is_loaded(weight: fx.Node) -> bool:
    return weight.meta.get("kind") == "weight" and "recipe" in weight.meta


def _head_norm(graph: fx.Graph, query: fx.Node, key: fx.Node) -> fx.Node:
    """Insert the weights [2, D] of the norms of q's and k's heads."""
    weights = [bind(norm).weight for norm in (query, key)]
    recipe = cat(0, [unsqueeze(weight.meta["recipe"], 0) for weight in weights])
    shape, dtype = (2, int(shape_of(weights[0])[0])), weights[0].meta["val"].dtype
    name = f"{weights[0].name}_and_key"
    return insert_placeholder(graph, name, "weight", shape, dtype, after=weights[1], recipe=recipe)


def _check(q: _Heads, k: _Heads, v: _Heads) -> None:
    bounds = (0, k.start, v.start, int(shape_of(v.packed)[-1]))
    if not (q.packed is k.packed is v.packed) or (q.start, q.end, k.end, v.end) != bounds:
        raise Refused("q, k and v are not, in this order, the parts of one packed projection")
    if q.angles != k.angles or v.angles is not None:
        raise Refused("q and k are not rotated by the same angles (is lift_rope off?)")
    if len({None if heads.norm is None else bind(heads.norm).eps for heads in (q, k)}) > 1 or v.norm is not None:
        raise Refused("q and k have different norms")
    if q.transformed != k.transformed or v.transformed:
        raise Refused("the Hadamard transform is on one side only")
