"""Keys and queries of like size, pair by pair, before they are quantized."""

import operator

import torch
from torch import fx

from ...ops.attention.rope_append import rope_append
from ...ops.core.eight_bits import QUANTIZED_MAX
from ...ops.rows.rms_norm import add_rms_norm, rms_norm
from ..graph.nodes import aten, bind, insert_placeholder, is_call, set_operands, shape_of, through_views
from ..graph.recipe import Recipe, cat, key_balance, multiply
from ..program.layers import layer_of_name
from .base import Context, PassReport


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
    query, key = _rows(packed)
    balance = key_balance(query, key, _gain(packed), kv_heads, width)
    layer = layer_of_name(cache.name)
    shape = (kv_heads, width // 2)
    factors = insert_placeholder(
        graph, f"key_balance_{layer}", "weight", shape, torch.float32, after=bound.kv_scales, recipe=balance
    )
    if center is not None:
        center.meta["recipe"] = _scaled(center.meta["recipe"], cat(1, (balance, balance)))
    set_operands(append, key_balance=factors)


def _rows(packed: fx.Node) -> tuple[Recipe, Recipe]:
    """The recipes of W_q and W_k."""
    if not is_call(packed, aten.linear.default):
        raise _Refused(f"{packed.name} is no linear")
    weight = bind(packed).weight
    recipe = weight.meta.get("recipe")
    if recipe is None or recipe.op != "cat" or len(recipe.args) != 3:
        raise _Refused(f"{weight.name} is not packed from the weights of q, k and v")
    return recipe.args[0], recipe.args[1]


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
