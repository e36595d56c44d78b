"""Keys of a quantized cache without their bias."""

import torch
from torch import fx

from ....ops.attention.append_kv import append_kv
from ....ops.core.eight_bits import QUANTIZED_MAX
from ...graph.nodes import bind, insert_placeholder, is_call, set_operands, shape_of
from ...graph.recipe import Recipe, calibrated, hadamard
from ...graph.slices import sliced
from ...program.layers import layer_of_name
from ..base import Context, PassReport
from .quantize_kv import is_rotated


def key_center_name(layer: int) -> str:
    """The name under which recipes look for a layer's constant: fp32 [kv heads, head dim], after RoPE, before any
    Hadamard transform.
    """
    return f"model.layers.{layer}.self_attn.key_center"


def center_keys(graph: fx.Graph, context: Context) -> PassReport:
    """A calibrated constant per head and channel is subtracted from every key before it is quantized.

    before  append_kv = sidestream.append_kv(k, v, kv_cache, kv_scales, slot_mapping)
    after   append_kv = sidestream.append_kv(k, v, kv_cache, kv_scales, slot_mapping, key_center)
            # key_center: fp32 [8, 128], a weight

    All scores of a query change by the same q . constant, which softmax does not see: exact for any constant, and a
    key's scale is no longer set by what all keys have in common. The constant comes from a calibration (zeros without
    one), rotated by its recipe where the keys are. Matches layers that `center_keys` names. Leaves caches that are not
    quantized.
    """
    report = PassReport(0)
    if context.options.center_keys is False:
        return report
    for append in list(graph.nodes):
        if not is_call(append, append_kv):
            continue
        key, cache = bind(append).k, bind(append).kv_cache
        layer = layer_of_name(cache.name)
        if not context.options.applies("center_keys", layer):
            continue
        if layer is None or cache.meta["val"].dtype not in QUANTIZED_MAX:
            reason = (
                f"{cache.name} is not quantized: there is nothing to gain"
                if layer is not None
                else f"{cache.name} does not tell its layer"
            )
            report.rejected.append(f"{append.name}: {reason}")
            continue
        shape = int(shape_of(key)[1]), int(shape_of(key)[2])
        recipe = _constant(layer, cache, shape)
        if is_rotated(key):
            recipe = hadamard(recipe, 1, shape[1])
        center = insert_placeholder(
            graph, f"key_center_{layer}", "weight", shape, torch.float32, after=bind(append).kv_scales, recipe=recipe
        )
        set_operands(append, key_center=center)
        report.matches += 1
    return report


def _constant(layer: int, cache: fx.Node, shape: tuple[int, int]) -> Recipe:
    """The calibrated constant of all heads, or of those of them that `shard` has left in the cache."""
    share, heads = cache.meta.get("heads", (None, shape[0]))
    whole = calibrated(key_center_name(layer), (heads, shape[1]))
    return whole if share is None else sliced(whole, 0, share, heads)
