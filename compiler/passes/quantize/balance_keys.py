"""Equal magnitudes of keys and queries, RoPE pair by RoPE pair, before they are quantized."""

import operator
from functools import partial

import torch
from torch import fx

from ....ops.attention.rope_append import rope_append
from ....ops.core.dtypes import QUANTIZED_MAX
from ....ops.elementwise.rms_norm import add_rms_norm, rms_norm
from ....ops.lora.adjust import lora_adjust
from ...graph.layer_names import layer_of_name
from ...graph.nodes import aten, bind, calls, insert_placeholder, is_call, set_operands, shape_of, through_views
from ...graph.recipe import Recipe, cat, key_balance, multiply, norm_balance
from ..base import Context, PassReport, Refused, rewrite_each


def balance_keys(graph: fx.Graph, context: Context) -> PassReport:
    """Scale each RoPE pair of a KV head so that keys and queries have equal magnitudes.

    before  q = sidestream.rope_append(linear, lora, cos, sin, kv_cache, kv_scales, slot_mapping, 32, 8, True)
    after   q = sidestream.rope_append(linear, lora, cos, sin, kv_cache, kv_scales, slot_mapping, 32, 8, True, None,
                                       key_balance)  # fp32 [8, 64], a weight

    Keys are multiplied by a factor and queries divided by it, so scores are unchanged. A pair that is large only in K
    would determine the quantization step of the whole head. A score's error is proportional to |q| |k|, which is
    minimal for equal magnitudes (SmoothAttention of QServe, arXiv 2405.04532, also moves outliers from K to Q). The
    magnitudes are estimated from the rows and biases of q_proj and k_proj, or from the weights of their head norms.
    Factors are powers of two: only the quantizer's rounding changes. A constant of `center_keys` is scaled too. Matches
    layers in `balance_keys`. Leaves unquantized caches, and projections that are not packed after a norm.
    """

    def applies(append: fx.Node) -> bool:
        return context.options.applies("balance_keys", layer_of_name(bind(append).kv_cache.name))

    return rewrite_each(filter(applies, calls(graph, rope_append)), partial(_balance, graph))


def _balance(graph: fx.Graph, append: fx.Node) -> None:
    bound = bind(append)
    packed, cache, center, kv_heads = bound.qkv, bound.kv_cache, bound.key_center, bound.num_kv_heads
    if cache.meta["val"].dtype not in QUANTIZED_MAX:
        raise Refused(f"{cache.name} is not quantized: there is nothing to gain")
    width = int(shape_of(cache)[-1])
    if bound.head_norm is not None:
        query, key = _parts(bound.head_norm, 2)
        balance = norm_balance(query, key, kv_heads)
    else:
        query, key, _ = _parts(_weight(packed), 3)
        biases = () if bound.bias is None else _parts(bound.bias, 3)[:2]
        balance = key_balance(query, key, _gain(packed), kv_heads, width, biases)
    name, shape = f"key_balance_{layer_of_name(cache.name)}", (kv_heads, width // 2)
    after = bound.kv_scales
    factors = insert_placeholder(graph, name, "weight", shape, torch.float32, after=after, recipe=balance)
    if center is not None:
        center.meta["recipe"] = _scaled(center.meta["recipe"], cat(1, (balance, balance)))
    set_operands(append, key_balance=factors)


def _weight(packed: fx.Node) -> fx.Node:
    """Return the packed weight of q, k and v."""
    packed = bind(packed).y if is_call(packed, lora_adjust) else packed
    if not is_call(packed, aten.linear.default):
        raise Refused(f"{packed.name} is not a linear")
    weight: fx.Node = bind(packed).weight
    return weight


def _parts(packed: fx.Node, count: int) -> tuple[Recipe, ...]:
    """Return the recipes from which a loaded tensor was packed."""
    recipe = packed.meta.get("recipe")
    if recipe is None or recipe.op != "cat" or len(recipe.args) != count:
        raise Refused(f"{packed.name} is not packed from {count} weights, of q, k and v or of their norms")
    parts: tuple[Recipe, ...] = recipe.args
    return parts


def _gain(packed: fx.Node) -> Recipe:
    """Return the recipe of the weight of the norm before the projection."""
    packed = bind(packed).y if is_call(packed, lora_adjust) else packed
    x = through_views(bind(packed).input)
    norm = bind(x).source if is_call(x, operator.getitem) else x
    gain = bind(norm).weight if is_call(norm, rms_norm, add_rms_norm) else None
    if gain is None or "recipe" not in gain.meta:
        raise Refused(f"{packed.name} does not follow a norm with a loaded weight")
    recipe: Recipe = gain.meta["recipe"]
    return recipe


def _scaled(center: Recipe, factors: Recipe) -> Recipe:
    """Return a constant's recipe with the factors inside its Hadamard transform, if it has one."""
    if center.op == "hadamard":
        return Recipe("hadamard", (multiply(center.args[0], factors),), center.attrs)
    return multiply(center, factors)
