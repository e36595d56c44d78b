"""Keys and queries of like size, pair by pair, before they are quantized."""

import operator

import torch
from torch import fx

from ....ops.attention.rope_append import rope_append
from ....ops.core.eight_bits import QUANTIZED_MAX
from ....ops.elementwise.rms_norm import add_rms_norm, rms_norm
from ...graph.nodes import aten, bind, insert_placeholder, is_call, set_operands, shape_of, through_views
from ...graph.recipe import Recipe, cat, key_balance, multiply, norm_balance
from ...program.layers import layer_of_name
from ..base import Context, PassReport


class _Refused(Exception):
    """Why a layer is left alone."""


def balance_keys(graph: fx.Graph, context: Context) -> PassReport:
    """Each RoPE pair of a KV head is scaled so that its keys are as large as the queries that meet them, told from
    q_proj's and k_proj's rows.

    before  q = sidestream.rope_append(linear, lora, cos, sin, kv_cache, kv_scales, slot_mapping, 32, 8, True)
    after   q = sidestream.rope_append(linear, lora, cos, sin, kv_cache, kv_scales, slot_mapping, 32, 8, True, None,
                                       key_balance)  # fp32 [8, 64], a weight

    Keys times a factor and queries by it give the same scores. Where a pair is massive in K alone, its size sets the
    steps of the whole head; balanced, the head's |q| |k|, to which a score's error is proportional, is the least that
    factors can make it (SmoothAttention of QServe, arXiv 2405.04532, moves outliers from K to Q in the same way).
    Where each head of q and k is normed, the norms' weights tell the sizes; a bias counts with its rows.
    Factors are powers of two, so nothing but the quantizer sees them. A constant that `center_keys` subtracts is scaled
    along. Matches layers that `balance_keys` names. Leaves caches that are not quantized, and projections that are not
    packed after a norm.
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, rope_append) or not context.options.applies(
            "balance_keys", layer_of_name(bind(node).kv_cache.name)
        ):
            continue
        try:
            _balance(graph, node)
            report.matches += 1
        except _Refused as refusal:
            report.rejected.append(f"{node.name}: {refusal}")
    return report


def _balance(graph: fx.Graph, append: fx.Node) -> None:
    bound = bind(append)
    packed, cache, center, kv_heads = bound.qkv, bound.kv_cache, bound.key_center, bound.num_kv_heads
    if cache.meta["val"].dtype not in QUANTIZED_MAX:
        raise _Refused(f"{cache.name} is not quantized: there is nothing to gain")
    width = int(shape_of(cache)[-1])
    if bound.head_norm is not None:
        query, key = _parts(bound.head_norm, 2)
        balance = norm_balance(query, key, kv_heads)
    else:
        query, key, _ = _parts(_weight(packed), 3)
        biases = () if bound.bias is None else _parts(bound.bias, 3)[:2]
        balance = key_balance(query, key, _gain(packed), kv_heads, width, biases)
    layer = layer_of_name(cache.name)
    shape = (kv_heads, width // 2)
    factors = insert_placeholder(
        graph, f"key_balance_{layer}", "weight", shape, torch.float32, after=bound.kv_scales, recipe=balance
    )
    if center is not None:
        center.meta["recipe"] = _scaled(center.meta["recipe"], cat(1, (balance, balance)))
    set_operands(append, key_balance=factors)


def _weight(packed: fx.Node) -> fx.Node:
    """The weights of q, k and v."""
    if not is_call(packed, aten.linear.default):
        raise _Refused(f"{packed.name} is no linear")
    weight: fx.Node = bind(packed).weight
    return weight


def _parts(packed: fx.Node, count: int) -> tuple[Recipe, ...]:
    """The recipes from which a loaded tensor was packed."""
    recipe = packed.meta.get("recipe")
    if recipe is None or recipe.op != "cat" or len(recipe.args) != count:
        raise _Refused(f"{packed.name} is not packed from {count} weights, of q, k and v or of their norms")
    parts: tuple[Recipe, ...] = recipe.args
    return parts


def _gain(packed: fx.Node) -> Recipe:
    """The recipe of the norm's weight in front of the projection."""
    x = through_views(bind(packed).input)
    norm = bind(x).source if is_call(x, operator.getitem) else x
    gain = bind(norm).weight if is_call(norm, rms_norm, add_rms_norm) else None
    if gain is None or "recipe" not in gain.meta:
        raise _Refused(f"{packed.name} does not follow a norm with a loaded weight")
    recipe: Recipe = gain.meta["recipe"]
    return recipe


def _scaled(center: Recipe, factors: Recipe) -> Recipe:
    """A constant's recipe with the factors under its Hadamard transform, where the keys have them."""
    if center.op == "hadamard":
        return Recipe("hadamard", (multiply(center.args[0], factors),), center.attrs)
    return multiply(center, factors)
