"""Quantization of an activation -> part of the op that produces it."""

import operator

from torch import fx

from ....ops.attention.paged_attention import paged_attention, paged_attention_quant
from ....ops.core.registry import Op
from ....ops.elementwise.combine_rms_norm import combine_add_rms_norm, combine_add_rms_norm_quant
from ....ops.elementwise.quantize import quantize_rowwise
from ....ops.elementwise.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from ....ops.elementwise.silu_mul import silu_mul, silu_mul_quant
from ...graph.nodes import bind, calls, insert_call, insert_picks, is_call, operands_for, picks_of, replace_picks
from ..base import Context, PassReport, Refused, rewrite_each

# producer -> quantizing op, with results (y, q, scale) and then the producer's other results
FORMS: dict[str, tuple[Op, Op]] = {
    "norm": (rms_norm, rms_norm_quant),
    "add_norm": (add_rms_norm, add_rms_norm_quant),
    "combine_norm": (combine_add_rms_norm, combine_add_rms_norm_quant),
    "silu": (silu_mul, silu_mul_quant),
    "attention": (paged_attention, paged_attention_quant),
}


def fuse_quantize(graph: fx.Graph, context: Context) -> PassReport:
    """Fuse the quantization of an activation into the norm, SiLU * mul or attention that produces it.

    before  y = rms_norm(x, weight, eps); q, scale = quantize_rowwise(y, torch.int8, rotate=8); lora(y, ...)
    after   y, q, scale = sidestream.rms_norm_quant(x, weight, eps, keep=True, torch.int8, rotate=8); lora(y, ...)

    `keep` also writes the 16-bit row, if LoRA or another op reads it. Leaves quantizations of any other op's result,
    such as rows selected after the last norm.
    """

    def fuse(node: fx.Node) -> None:
        quantized = bind(node)
        value = quantized.x
        producer = bind(value).source if is_call(value, operator.getitem) and bind(value).place == 0 else value
        forms = next((pair for pair in FORMS.values() if is_call(producer, pair[0])), None)
        if forms is None:
            raise Refused(f"{producer.name} has no op that also quantizes")
        keep = any(user is not node for user in value.users)
        with graph.inserting_before(producer):
            operands = operands_for(producer, forms[1], keep=keep, dtype=quantized.dtype, rotate=quantized.rotate)
            new = insert_call(graph, forms[1], operands, like=producer)
            y, q, scale = insert_picks(graph, new, (0, 1, 2), like=producer)
        for place, pick in picks_of(producer):
            if place > 0:
                with graph.inserting_before(pick):
                    (moved,) = insert_picks(graph, new, (place + 2,), like=producer)
                pick.replace_all_uses_with(moved)
        replace_picks(node, {0: q, 1: scale})
        value.replace_all_uses_with(y)

    return rewrite_each(calls(graph, quantize_rowwise), fuse)
