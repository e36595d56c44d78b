"""A decode step's SiLU * mul makes the LoRA delta of gate and up itself, where that delta is megabytes."""

import torch
from torch import fx

from ....ops.elementwise.quantize import quantize_rowwise
from ....ops.elementwise.silu_mul import silu_mul_quant
from ....ops.lora.expand import lora_expand
from ....ops.lora.rounded import fits
from ....ops.lora.silu_mul_lora import silu_mul_lora
from ...graph.nodes import bind, insert_call, insert_picks, is_call, replace_picks, shape_of
from ..base import Context, PassReport
from .round_lora_ranks import insert_rounded

# at 8 an expand next to the projection is faster (H200); 17 to 32 are quantized in blocks
FEWEST_TOKENS, MOST_TOKENS = 33, 256


def fuse_lora_silu_mul(graph: fx.Graph, context: Context) -> PassReport:
    """No delta of gate and up is written: the op that adds it multiplies the shrunk rows with the adapters' rows, and
    the quantization is a launch of its own.

    before  delta = lora_expand(planes, b, order, tiles, tile, [14336, 14336], bs)
            h, q, s = silu_mul_quant(gate_up, delta, keep, int8, rotate)
    after   ranks, step = lora_round(planes, 2)  # on the side stream
            h = silu_mul_lora(gate_up, ranks, step, b, bs, order, tiles, tile); q, s = quantize_rowwise(h, int8, rotate)

    The expand would end after the projection during which it runs, and slow it down; the rounding, on its lane, is
    small. Matches SiLU * mul that reads an expand. For graphs with static sizes, with adapters in int8. Leaves deltas
    that more than one op reads, other halves than gate and up, token counts for which nobody measured a gain, sizes
    that the kernel doesn't take, and everything with lora_lowering="serial" or "side_stream", which keep launches of
    their own.
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, silu_mul_quant):
            continue
        silu = bind(node)
        gate_up, delta = silu.gate_up, silu.delta
        if not is_call(delta, lora_expand):
            continue
        reason = _stays(gate_up, delta, context.options.lora_lowering)
        if reason is not None:
            report.rejected.append(f"{node.name}: {reason}")
            continue
        expand = bind(delta)
        ranks, step = insert_rounded(graph, delta)
        with graph.inserting_before(node):
            tiling = (expand.token_order, expand.tiles, expand.tile)
            h = insert_call(graph, silu_mul_lora, (gate_up, ranks, step, expand.b, expand.b_scale, *tiling), like=node)
            quantized = insert_call(graph, quantize_rowwise, (h, silu.dtype, silu.rotate), like=node)
            results = (h, *insert_picks(graph, quantized, (0, 1), like=node))
        replace_picks(node, dict(enumerate(results)))
        report.matches += 1
    return report


def _stays(gate_up: fx.Node, delta: fx.Node, lowering: str) -> str | None:
    b, slices = bind(delta).b, bind(delta).slices
    if lowering != "auto":
        return f"lora_lowering is {lowering}"
    if len(delta.users) != 1:
        return f"more than one op reads {delta.name}"
    if b.meta["val"].dtype != torch.int8:
        return f"its adapters are {b.meta['val'].dtype}, and the launch takes torch.int8"
    (tokens, columns), rank = shape_of(delta), shape_of(b)[2]
    if shape_of(gate_up) != shape_of(delta) or list(slices) != [columns // 2] * 2:
        return (
            f"a delta {tuple(shape_of(delta))} of {', '.join(map(str, slices))} columns for "
            f"{tuple(shape_of(gate_up))}: no gate and up"
        )
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
        return f"{tokens} tokens: LoRA gains by it from {FEWEST_TOKENS} to {MOST_TOKENS}"
    return fits(int(rank))
