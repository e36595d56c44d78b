"""LoRA delta of gate and up in a decode step -> part of SiLU * mul."""

import torch
from torch import fx

from ....ops.elementwise.quantize import quantize_rowwise
from ....ops.elementwise.silu_mul import silu_mul_quant
from ....ops.lora.expand import lora_expand
from ....ops.lora.expand_rounded import fits
from ....ops.lora.silu_mul_lora import silu_mul_lora
from ...graph.nodes import bind, calls, group_plan_of, insert_call, insert_picks, is_call, replace_picks, shape_of
from ..base import Context, PassReport, Refused, rewrite_each
from .round_lora_ranks import insert_rounded

# at 8 an expand next to the projection is faster (H200); 17 to 32 are quantized in blocks
FEWEST_TOKENS, MOST_TOKENS = 33, 256


def fuse_lora_silu_mul(graph: fx.Graph, context: Context) -> PassReport:
    """Compute a decode step's LoRA delta of gate and up in SiLU * mul, without writing the delta.

    before  delta = lora_expand(planes, b, order, tiles, tile, [14336, 14336], bs)
            h, q, s = silu_mul_quant(gate_up, delta, keep, int8, rotate)
    after   ranks, step = lora_round(planes, 2)  # on the side stream
            h = silu_mul_lora(gate_up, ranks, step, b, bs, order, tiles, tile); q, s = quantize_rowwise(h, int8, rotate)

    The expand would run during the projection, slow it down and end after it; the rounding on its lane is short. For
    static sizes, with adapters in int8. Leaves deltas with several readers, slices other than gate and up, token counts
    without a measured gain, sizes that the kernel does not support, deltas of experts, and all deltas with
    lora_lowering="serial" or "side_stream".
    """

    def fuse(node: fx.Node) -> None:
        silu, delta = bind(node), bind(node).delta
        _check(silu.gate_up, delta, context.options.lora_lowering)
        expand = bind(delta)
        ranks, step = insert_rounded(graph, delta)
        with graph.inserting_before(node):
            lora = (ranks, step, expand.b, expand.b_scale, expand.token_order, expand.tiles, expand.tile)
            h = insert_call(graph, silu_mul_lora, (silu.gate_up, *lora), like=node)
            quantized = insert_call(graph, quantize_rowwise, (h, silu.dtype, silu.rotate), like=node)
            results = (h, *insert_picks(graph, quantized, (0, 1), like=node))
        replace_picks(node, dict(enumerate(results)))

    products = calls(graph, silu_mul_quant)
    return rewrite_each((node for node in products if is_call(bind(node).delta, lora_expand)), fuse)


def _check(gate_up: fx.Node, delta: fx.Node, lowering: str) -> None:
    b, slices = bind(delta).b, bind(delta).slices
    if lowering != "auto":
        raise Refused(f"lora_lowering is {lowering}")
    if group_plan_of(delta) is not None:
        raise Refused("it is a branch of experts")
    if len(delta.users) != 1:
        raise Refused(f"more than one op reads {delta.name}")
    if b.meta["val"].dtype != torch.int8:
        raise Refused(f"its adapters are {b.meta['val'].dtype}; the kernel supports only torch.int8")
    (tokens, columns), rank = shape_of(delta), shape_of(b)[2]
    if shape_of(gate_up) != shape_of(delta) or list(slices) != [columns // 2] * 2:
        raise Refused(
            f"a delta {tuple(shape_of(delta))} of {', '.join(map(str, slices))} columns for "
            f"{tuple(shape_of(gate_up))} is not that of gate and up"
        )
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
        raise Refused(f"{tokens} tokens: faster from {FEWEST_TOKENS} to {MOST_TOKENS}")
    reason = fits(int(rank))
    if reason:
        raise Refused(reason)
