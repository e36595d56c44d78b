"""What the engine does not do, for comparison: one FP8 scale per tensor, an FP8 cache without scales, PV in FP8 as the
tensor cores add it, and planted faults.

Each is a pass put into the pipeline by `insert_pass`, an edit of the loaded weights, or both. The ops here have a
reference only: right on every device, slow.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import torch
from torch import fx

from ...compiler.graph.nodes import bind, insert_call, is_call, set_operands
from ...compiler.graph.recipe import Recipe, materialize
from ...compiler.passes.base import Context, PassReport
from ...compiler.pipeline import PASSES, Pass, insert_pass
from ...ops.attention.append_kv import append_kv
from ...ops.attention.paged_attention import (
    check_arguments,
    gather_keys_values,
    hidden_keys,
    paged_attention,
    paged_attention_fake,
)
from ...ops.core.eight_bits import QUANTIZED_MAX
from ...ops.core.kv_layout import PAGE_SIZE
from ...ops.core.registry import as_outputs, register
from ...ops.core.triton_support import cdiv
from ...ops.elementwise.hadamard import hadamard
from ...ops.elementwise.quantize import fake as quantize_rowwise_fake
from ...ops.elementwise.quantize import quantize_rowwise, rotate_blocks, to_steps

E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
KEPT_BITS = -1 << 10  # of fp32's 23 mantissa bits the FP8 tensor cores of Hopper keep 13 in their sums
KEYS_AT_ONCE = 32  # one FP8 matrix instruction adds this many products
PRODUCT_ELEMENTS = 1 << 24  # made by one matrix product
WRONG_FACTOR = 4.0
WeightEdit = Callable[[Mapping[str, torch.Tensor], Mapping[str, Recipe], Callable[[str], torch.Tensor]], None]


def _launcher(reference: Callable[..., Any]) -> Callable[..., None]:
    """The reference as a launch: writes the planned outputs on whatever device they lie."""

    def launch(*args: Any, out: tuple[torch.Tensor, ...], sm_budget: Optional[int] = None, pdl: bool = False) -> None:
        for target, value in zip(out, as_outputs(reference(*args)), strict=True):
            target.copy_(value)

    return launch


def quantize_tensorwise_reference(
    x: torch.Tensor, dtype: torch.dtype = E4M3, rotate: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] (`dtype` e4m3, not rotated) -> (e4m3 [..., K], fp32 scale [...], the same for all rows).

    The largest value of the step sets the scale, as in dynamic per-tensor FP8.
    """
    values = x.float()
    scale = values.abs().amax().clamp_min(1e-12) / E4M3_MAX
    return (values / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale.expand(x.shape[:-1]).contiguous()


def round_e4m3_reference(x: torch.Tensor) -> torch.Tensor:
    """x rounded to e4m3 with scale 1 (what is too large becomes the largest), in its own dtype."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(x.dtype)


def round_e4m3_fake(x: torch.Tensor) -> torch.Tensor:
    """The results of `round_e4m3_reference`, not filled."""
    return x.new_empty(x.shape)


def attention_fp8_pv_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_scales: Optional[torch.Tensor],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    quantize_q: bool,
    decode: bool,
    wide: Optional[torch.Tensor] = None,
    plan: Optional[torch.Tensor] = None,
    window: int = 0,
) -> torch.Tensor:
    """`paged_attention` with P and V in e4m3: P in (0, 1] before it is normalised, V with one scale per head, and sums
    over 32 keys at a time in 13 bits.

    Hopper's FP8 matrix instruction keeps about 14 bits of its accumulator and cuts the rest off, so long sums lose what
    comes late; 16-bit PV does not.
    """
    check_arguments(q, kv_cache, kv_scales, window)
    tokens, heads, dim = q.shape
    kv_heads = kv_cache.shape[1]
    out = q.new_zeros(tokens, heads, dim)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for sequence, context in enumerate(contexts):
        first, last = starts[sequence], starts[sequence + 1]
        if context == 0 or first == last:
            continue
        count = last - first
        keys, values = gather_keys_values(
            kv_cache, kv_scales, block_table[sequence, : cdiv(context, PAGE_SIZE)].long(), context
        )
        query = q[first:last].float().view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        scores = query @ keys[:, None].transpose(-1, -2) * softmax_scale
        position = torch.arange(context - count, context, device=q.device)
        scores = scores.masked_fill(hidden_keys(position, context, window), float("-inf"))
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        total = weights.sum(-1, keepdim=True)
        step = values.abs().amax((-1, -2), keepdim=True).clamp_min(1e-12) / E4M3_MAX
        rounded = (values / step).to(E4M3).float()[:, None]
        weights = weights.to(E4M3).float()
        sums = torch.zeros_like(query)
        bits = sums.view(torch.int32)
        for products in _products(weights, rounded):
            sums.add_(products)
            bits.bitwise_and_(KEPT_BITS)
        out[first:last] = (sums * step[:, None] / total).permute(2, 0, 1, 3).reshape(count, heads, dim).to(q.dtype)
    return out.view(tokens, heads * dim)


def _products(weights: torch.Tensor, values: torch.Tensor) -> Iterator[torch.Tensor]:
    """weights [HK, G, T, S] times values [HK, 1, S, D], each time over the next KEYS_AT_ONCE keys: [HK, G, T, D]; as
    many at once as PRODUCT_ELEMENTS allows, since one query over many keys is nothing but launches."""
    kv_heads, group, count, context = weights.shape
    blocks = cdiv(context, KEYS_AT_ONCE)
    more = (0, blocks * KEYS_AT_ONCE - context)
    apart = (
        torch.nn.functional.pad(weights, more).view(kv_heads, group * count, blocks, KEYS_AT_ONCE).permute(2, 0, 1, 3)
    )
    below = (
        torch.nn.functional.pad(values[:, 0], (0, 0, *more)).view(kv_heads, blocks, KEYS_AT_ONCE, -1).transpose(0, 1)
    )
    for some, others in zip(
        *(
            each.split(max(PRODUCT_ELEMENTS // (kv_heads * group * count * values.shape[-1]), 1))
            for each in (apart, below)
        ),
        strict=True,
    ):
        yield from (some @ others).view(len(some), kv_heads, group, count, -1)


quantize_tensorwise = register(
    "emulated_quantize_tensorwise",
    quantize_tensorwise_reference,
    quantize_rowwise_fake,
    _launcher(quantize_tensorwise_reference),
    family="quantize",
)
round_e4m3 = register(
    "emulated_round_e4m3", round_e4m3_reference, round_e4m3_fake, _launcher(round_e4m3_reference), family="quantize"
)
attention_fp8_pv = register(
    "emulated_attention_fp8_pv",
    attention_fp8_pv_reference,
    paged_attention_fake,
    _launcher(attention_fp8_pv_reference),
    family="attention",
)


def emulate_tensorwise(graph: fx.Graph, context: Context) -> PassReport:
    """Activations get one scale per tensor instead of one per token (with fuse_quantize off, so that each
    quantization is an op of its own).
    """
    return _swap(graph, quantize_rowwise, quantize_tensorwise)


def emulate_unscaled_cache(graph: fx.Graph, context: Context) -> PassReport:
    """Keys and values have e4m3's values when they are appended to a 16-bit cache (with fuse_rope_append off)."""
    report = PassReport(0)
    for node in list(graph.nodes):
        if is_call(node, append_kv):
            with graph.inserting_before(node):
                rounded = {name: insert_call(graph, round_e4m3, (getattr(bind(node), name),)) for name in ("k", "v")}
            set_operands(node, **rounded)
            report.matches += 1
    return report


def emulate_fp8_pv(graph: fx.Graph, context: Context) -> PassReport:
    """Attention multiplies P and V in FP8 with the tensor cores' short sums (with fuse_quantize off)."""
    return _swap(graph, paged_attention, attention_fp8_pv)


def plant_one_sided_hadamard(graph: fx.Graph, context: Context) -> PassReport:
    """A fault: K is transformed, Q is not (with fuse_rope_append off)."""
    report = PassReport(0)
    for node in list(graph.nodes):
        if is_call(node, paged_attention) and is_call(bind(node).q, hadamard):
            set_operands(node, q=bind(bind(node).q).x)
            report.matches += 1
    return report


def _swap(graph: fx.Graph, old: Any, new: Any) -> PassReport:
    report = PassReport(0)
    for node in graph.nodes:
        if is_call(node, old):
            node.target = new.overload
            report.matches += 1
    return report


def with_tensorwise() -> tuple[Pass, ...]:
    """The pipeline with `emulate_tensorwise`."""
    return insert_pass(emulate_tensorwise, after="quantize_linears", tier="quantizes")


def with_unscaled_cache() -> tuple[Pass, ...]:
    """The pipeline with `emulate_unscaled_cache`."""
    return insert_pass(emulate_unscaled_cache, after="center_keys", tier="quantizes")


def with_fp8_pv() -> tuple[Pass, ...]:
    """The pipeline with `emulate_fp8_pv`."""
    return insert_pass(emulate_fp8_pv, after="fuse_rope_append", tier="quantizes")


def with_one_sided_hadamard() -> tuple[Pass, ...]:
    """The pipeline with `plant_one_sided_hadamard`."""
    return insert_pass(plant_one_sided_hadamard, after="quantize_kv", tier="quantizes")


def plain() -> tuple[Pass, ...]:
    """The pipeline as it is."""
    return PASSES


def tensorwise_weights(
    tensors: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe], lookup: Callable[[str], torch.Tensor]
) -> None:
    """Quantize each (packed) weight matrix again with one scale, in place, from the checkpoint's own values."""
    for name, scales in _values_and_scales(recipes):
        weight = materialize(recipes[name].args[0].args[0], lookup).float()
        scale = weight.abs().amax().clamp_min(1e-12) / E4M3_MAX
        tensors[name].copy_((weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3))
        tensors[scales].fill_(float(scale))


def _values_and_scales(recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, str]]:
    """The names of both, of every weight that is rounded while it is loaded."""
    items = {(recipe.args[0], recipe.attrs["index"]): name for name, recipe in recipes.items() if recipe.op == "item"}
    for (quantize, index), name in items.items():
        if index == 0:
            yield name, items[quantize, 1]


def least_squares_weights(
    tensors: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe], lookup: Callable[[str], torch.Tensor]
) -> None:
    """Round each weight matrix again, in place, each row with the scale of the least squared error: that of its largest
    value, or one of 24 smaller ones that cut it.
    """
    for name, scales in _values_and_scales(recipes):
        quantize = recipes[name].args[0]
        weight = rotate_blocks(materialize(quantize.args[0], lookup), quantize.attrs["rotate"])
        largest = weight.abs().amax(-1).clamp_min(1e-12) / QUANTIZED_MAX[tensors[name].dtype]
        least = torch.full_like(largest, torch.inf)
        for cut in range(25):
            scale = largest * (1 - 0.01 * cut)
            steps = to_steps(weight, scale[:, None], tensors[name].dtype)
            error = (weight - steps.float() * scale[:, None]).square().sum(-1)
            better = error < least
            least = torch.where(better, error, least)
            tensors[scales].copy_(torch.where(better, scale, tensors[scales]))
            tensors[name].copy_(torch.where(better[:, None], steps, tensors[name]))


def wrong_scale(
    tensors: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe], lookup: Callable[[str], torch.Tensor]
) -> None:
    """A fault: the scales of the middle layer's down projection are four times what they should be."""
    wanted = sorted(
        name
        for name, recipe in recipes.items()
        if recipe.op == "item" and recipe.attrs["index"] == 1 and _only_source(recipe, "down_proj")
    )
    if not wanted:
        raise ValueError("no quantized down projection is there to plant a wrong scale in")
    by_layer = sorted(wanted, key=lambda name: _layer_of(recipes[name]))
    tensors[by_layer[len(by_layer) // 2]].mul_(WRONG_FACTOR)


def _only_source(recipe: Recipe, projection: str) -> bool:
    return all(f".{projection}." in source for source in recipe.sources())


def _layer_of(recipe: Recipe) -> int:
    source = min(recipe.sources())
    return int(source.split(".layers.")[1].split(".")[0])
