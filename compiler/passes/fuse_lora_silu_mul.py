"""A decode step's gate_up projection, its LoRA branch and SiLU * mul -> one launch."""
import operator

import torch
from torch import fx

from ...ops.linear_8bit import linear_8bit
from ...ops.linear_8bit_lora_silu_mul import fits, linear_8bit_lora_silu_mul
from ...ops.lora_active import lora_active
from ...ops.lora_expand import lora_expand
from ...ops.lora_plan import lora_plan
from ...ops.lora_shrink import lora_shrink
from ...ops.quantize import quantize_rowwise
from ...ops.silu_mul import silu_mul_quant
from ..nodes import args_of, insert_call, is_call, shape_of
from .base import Context, PassReport


def fuse_lora_silu_mul(graph: fx.Graph, context: Context) -> PassReport:
    """The projection's tiles add their adapters' part themselves and store silu(gate) * up; the SMs that they leave free shrink meanwhile.

    before  gate_up = linear_8bit(q, s, w, ...); planes = lora_shrink(q, a, ..., s); delta = lora_expand(planes, b, ...)
            y, q2, s2 = silu_mul_quant(gate_up, delta, ...)
    after   h = linear_8bit_lora_silu_mul(q, s, w, ws, a, as, b, bs, adapter_index, active, bf16); q2, s2 = quantize_rowwise(h, ...)

    `active` lists the step's adapters, once a step (`lora_active`). For graphs with static sizes, in int8. Leaves branches whose shrink reads other rows than
    the projection, sizes that the kernel doesn't take, and everything without lora_lowering="one_launch": the kernel's present form was not timed on a GPU yet.
    """
    report = PassReport(0)
    active: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if not is_call(node, silu_mul_quant) or args_of(node)[1] is None:
            continue
        found = _branch(node, context)
        if isinstance(found, str):
            report.rejected.append(f"{node.name}: {found}")
            continue
        linear, shrink, expand = found
        q, scale, weight, weight_scale, *_addends, out_dtype = args_of(linear)
        plan = args_of(args_of(shrink)[2])[0]
        index, slots, _tile = args_of(plan)
        if plan not in active:
            with graph.inserting_after(plan):
                active[plan] = insert_call(graph, lora_active, (index, slots), like=plan)
            active[plan].meta.update({key: plan.meta[key] for key in ("stream", "sm_share") if key in plan.meta})
        adapters = (args_of(shrink)[1], args_of(shrink)[6], args_of(expand)[1], args_of(expand)[6])
        with graph.inserting_before(node):
            h = insert_call(graph, linear_8bit_lora_silu_mul, (q, scale, weight, weight_scale, *adapters, index, active[plan], out_dtype), like=linear)
            rounded = insert_call(graph, quantize_rowwise, (h, *args_of(node)[3:]), like=node)
            results = (h, *(insert_call(graph, operator.getitem, (rounded, place), like=node) for place in (0, 1)))
        for pick in list(node.users):
            pick.replace_all_uses_with(results[args_of(pick)[1]])
        report.matches += 1
    return report


def _branch(node: fx.Node, context: Context) -> tuple[fx.Node, fx.Node, fx.Node] | str:
    """(projection, shrink, expand) in front of a SiLU * mul, or why they stay."""
    linear, expand, *_form = args_of(node)
    if context.options.lora_lowering != "one_launch":
        return f"lora_lowering is {context.options.lora_lowering}"
    if not is_call(linear, linear_8bit) or not is_call(expand, lora_expand):
        return "its inputs are no projection and its LoRA branch"
    shrink = args_of(expand)[0]
    if not is_call(shrink, lora_shrink) or not is_call(args_of(args_of(shrink)[2])[0], lora_plan):
        return "its LoRA branch is not planned and shrunk here"
    if any(len(each.users) > 1 for each in (linear, expand, shrink)):
        return f"{linear.name} or its LoRA branch has other readers"
    q, scale, weight, _weight_scale, added, residual, out_dtype = args_of(linear)
    if added is not None or residual is not None:
        return f"something is added to {linear.name} first"
    if args_of(shrink)[0] is not q or args_of(shrink)[7] is not scale:
        return "LoRA reads other rows than the projection (lora_input)"
    if any(each.meta["val"].dtype != torch.int8 for each in (q, weight, args_of(shrink)[1], args_of(expand)[1])) or out_dtype != torch.bfloat16:
        return "the launch takes int8 and makes bf16"
    (tokens, k), n, (slots, _n, rank) = shape_of(q), shape_of(weight)[0], shape_of(args_of(expand)[1])
    return fits(int(tokens), int(n), int(k), int(rank), int(slots), context.sm_count) or (linear, shrink, expand)
