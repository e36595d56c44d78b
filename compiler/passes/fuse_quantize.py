"""The quantization of an activation moves into the op that makes it."""

import operator

from torch import fx

from ...ops.attention.paged_attention import paged_attention, paged_attention_quant
from ...ops.core.registry import Op
from ...ops.rows.quantize import quantize_rowwise
from ...ops.rows.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from ...ops.rows.silu_mul import silu_mul, silu_mul_quant
from ..graph.nodes import args_of, insert_call, is_call
from .base import Context, PassReport

# producer -> its quantizing form, whose results are (y, q, scale) and then whatever else the producer returned
FORMS: dict[str, tuple[Op, Op]] = {
    "norm": (rms_norm, rms_norm_quant),
    "add_norm": (add_rms_norm, add_rms_norm_quant),
    "silu": (silu_mul, silu_mul_quant),
    "attention": (paged_attention, paged_attention_quant),
}


def fuse_quantize(graph: fx.Graph, context: Context) -> PassReport:
    """Norm, SiLU * mul and attention write their row in eight bits with its scale; the 16-bit row too where somebody
    still reads it.

    before  y = rms_norm(x, weight, eps); q, scale = quantize_rowwise(y, torch.int8, rotate=8); lora(y, ...)
    after   y, q, scale = sidestream.rms_norm_quant(x, weight, eps, keep=True, torch.int8, rotate=8); lora(y, ...)

    LoRA reads the row before quantization, hence `keep`. Leaves quantizations of anything else, such as rows selected
    after the last norm.
    """
    report = PassReport(0)
    for node in list(graph.nodes):
        if not is_call(node, quantize_rowwise):
            continue
        value = args_of(node)[0]
        producer = args_of(value)[0] if value.target is operator.getitem and args_of(value)[1] == 0 else value
        forms = next((pair for pair in FORMS.values() if is_call(producer, pair[0])), None)
        if forms is None:
            report.rejected.append(f"{node.name}: {producer.name} has no quantizing form")
            continue
        keep = any(user is not node for user in value.users)
        with graph.inserting_before(producer):
            new = insert_call(graph, forms[1], (*args_of(producer), keep, *args_of(node)[1:]), like=producer)
            y, q, scale = (insert_call(graph, operator.getitem, (new, place), like=producer) for place in (0, 1, 2))
        for user in list(producer.users) if producer is not value else ():
            if user is not value:
                with graph.inserting_before(user):
                    user.replace_all_uses_with(
                        insert_call(graph, operator.getitem, (new, args_of(user)[1] + 2), like=producer)
                    )
        for user in list(node.users):
            user.replace_all_uses_with((q, scale)[args_of(user)[1]])
        value.replace_all_uses_with(y)
        report.matches += 1
    return report
