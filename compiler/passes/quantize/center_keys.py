"""A calibrated constant subtracted from the keys of a quantized cache."""

import torch
from torch import fx

from ....ops.attention.append_kv import append_kv
from ....ops.core.dtypes import QUANTIZED_MAX
from ...graph.layer_names import layer_of_name
from ...graph.nodes import bind, calls, insert_placeholder, set_operands, shape_of
from ...graph.recipe import Recipe, calibrated, hadamard, sliced
from ..base import Context, PassReport, Refused, rewrite_each
from .quantize_kv import is_rotated


def key_center_name(layer: int) -> str:
    """Return the name of a layer's constant in recipes: fp32 [kv heads, head dim], after RoPE, before Hadamard."""
    return f"model.layers.{layer}.self_attn.key_center"


def center_keys(graph: fx.Graph, context: Context) -> PassReport:
    """Subtract a calibrated constant per head and channel from every key before it is quantized.

    before  append_kv = sidestream.append_kv(k, v, kv_cache, kv_scales, slot_mapping)
    after   append_kv = sidestream.append_kv(k, v, kv_cache, kv_scales, slot_mapping, key_center)
            # key_center: fp32 [8, 128], a weight

    All scores of a query change by the same q . constant, so softmax is unchanged, and the common part of all keys does
    not enlarge their scales. Without a calibration the constant is zero; if keys are rotated, its recipe rotates it.
    Matches layers in `center_keys`. Leaves unquantized caches.
    """

    def applies(append: fx.Node) -> bool:
        return context.options.applies("center_keys", layer_of_name(bind(append).kv_cache.name))

    def center(append: fx.Node) -> None:
        key, cache = bind(append).k, bind(append).kv_cache
        layer = layer_of_name(cache.name)
        if layer is None:
            raise Refused(f"{cache.name} has no layer number in its name")
        if cache.meta["val"].dtype not in QUANTIZED_MAX:
            raise Refused(f"{cache.name} is not quantized: there is nothing to gain")
        shape = int(shape_of(key)[1]), int(shape_of(key)[2])
        recipe = _constant(layer, cache, shape)
        if is_rotated(key):
            recipe = hadamard(recipe, 1, shape[1])
        name, scales = f"key_center_{layer}", bind(append).kv_scales
        constant = insert_placeholder(graph, name, "weight", shape, torch.float32, after=scales, recipe=recipe)
        set_operands(append, key_center=constant)

    return rewrite_each(filter(applies, calls(graph, append_kv)), center)


def _constant(layer: int, cache: fx.Node, shape: tuple[int, int]) -> Recipe:
    """Return the recipe of the constant, for all heads or for the rank's share of them (`shard`)."""
    share, heads = cache.meta.get("heads", (None, shape[0]))
    whole = calibrated(key_center_name(layer), (heads, shape[1]))
    return whole if share is None else sliced(whole, 0, share, heads)
