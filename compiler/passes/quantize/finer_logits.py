"""Logits in fp16 instead of bf16."""

import torch
from torch import fx

from ....ops.linear.linear_8bit import linear_8bit
from ...graph.nodes import bind, is_call, set_operands
from ..base import Context, PassReport


def finer_logits(graph: fx.Graph, context: Context) -> PassReport:
    """The output projection rounds its sums to fp16, which has eight times finer steps than bf16 in as many bytes.

    before  logits = sidestream.linear_8bit(q, scale, weight_int8, weight_scale, None, None, torch.bfloat16)
    after   logits = sidestream.linear_8bit(q, scale, weight_int8, weight_scale, None, None, torch.float16)

    A logit between 16 and 32, as a likely token has, is rounded to 1/64 instead of 1/8, so that fewer tokens tie. Costs
    nothing: the sums are in fp32 anyway. A logit above 65,504 becomes infinite, and its request ends with an error.
    Matches linears in int8 whose bf16 result only the graph's output reads. Leaves other dtypes, and logits that
    something else reads (with tensor_parallel, the exchange that gathers them).
    """
    report = PassReport(0)
    if context.options.precision != "int8" or not context.options.finer_logits:
        return report
    for node in graph.nodes:
        if not is_call(node, linear_8bit) or not any(user.op == "output" for user in node.users):
            continue
        if bind(node).out_dtype != torch.bfloat16:
            report.rejected.append(f"{node.name}: its result is {bind(node).out_dtype}, not torch.bfloat16")
        elif len(node.users) > 1:
            report.rejected.append(f"{node.name}: {len(node.users) - 1} other nodes read it")
        else:
            set_operands(node, out_dtype=torch.float16)
            node.meta["val"] = node.meta["val"].to(torch.float16)
            report.matches += 1
    return report
