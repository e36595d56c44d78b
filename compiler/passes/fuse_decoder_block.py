"""The linears between two attentions -> `sidestream.decoder_block`, one launch; with their LoRA branches
`sidestream.decoder_block_lora`.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...ops.attention.paged_attention import paged_attention_quant
from ...ops.attention.paged_attention_blocks import paged_attention_blocks
from ...ops.attention.rope_append import rope_append
from ...ops.decoder_block import lora as with_lora
from ...ops.decoder_block.decoder_block import decoder_block, fits
from ...ops.decoder_block.lora import decoder_block_lora
from ...ops.decoder_block.lora_groups import lora_groups
from ...ops.linear.linear_8bit import linear_8bit
from ...ops.lora.expand import lora_expand
from ...ops.lora.plan import lora_plan
from ...ops.lora.shrink import lora_shrink
from ...ops.rows.quantize import NORM_ROTATES, SILU_ROTATES
from ...ops.rows.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from ...ops.rows.silu_mul import silu_mul_quant
from ..graph.nodes import args_of, insert_call, is_call, shape_of
from .base import Context, PassReport

MOST_TOKENS = 32  # from 33 on separate launches are faster on an H200
FEWEST_CTAS = 0.75  # share of the SMs that the kernel must occupy to be worth it: fewer can't saturate the memory


class _Refused(Exception):
    """Why a layer is left alone."""


@dataclass(frozen=True)
class _Branch:
    """The LoRA branch of one linear: its kernels, its four stacks (A, scales, B, scales), the widths of the packed
    linears.
    """

    shrink: fx.Node
    stacks: tuple[fx.Node, ...]
    index: fx.Node
    slices: tuple[int, ...]


def fuse_decoder_block(graph: fx.Graph, context: Context) -> PassReport:
    """o, the norms, gate_up, SiLU * mul, down and the next layer's q/k/v of a decode step become one persistent launch.

    before  _, q, s = paged_attention_quant(...); o = linear_8bit(q, s, ...); _, q, s, r = add_rms_norm_quant(o,
            residual, ...); up = linear_8bit(q, s, ...) _, q, s = silu_mul_quant(up); down = linear_8bit(q, s, ...); _,
            q, s, r = add_rms_norm_quant(down, r, ...); qkv = linear_8bit(q, s, ...)
    after   q, s = paged_attention_blocks(...); qkv, r = decoder_block(q, s, residual, ...)

    Behind the last layer there is no q/k/v: the block ends with the residual, the final norm stays. Activations have
    one scale per token and 128 columns. With lora_lowering="one_launch" the deltas' shrinks and expands go the same
    way, from eight-bit stacks, by groups = lora_groups(adapter_index) once and qkv, r = decoder_block_lora(q, s,
    residual, ..., groups, ...); other lowerings leave layers with LoRA. For graphs with static sizes. Leaves sizes that
    the kernel doesn't take, and with whole_layer="auto" those where it wins nothing.
    """
    report = PassReport(0)
    if context.options.whole_layer == "off":
        return report
    for node in list(graph.nodes):
        if not is_call(node, paged_attention_quant):
            continue
        try:
            _replace(graph, node, context)
            report.matches += 1
        except _Refused as refusal:
            report.rejected.append(f"{node.name}: {refusal}")
    return report


def _replace(graph: fx.Graph, attention: fx.Node, context: Context) -> None:
    o = _linear(attention)
    norm = _only(o, add_rms_norm_quant)
    gate_up = _linear(norm)
    silu = _only(gate_up, silu_mul_quant)
    down = _linear(silu)
    end = _only(down, add_rms_norm_quant, add_rms_norm)
    residual, gain, eps = args_of(norm)[1], args_of(norm)[3], args_of(norm)[4]
    branches = [_branch(args_of(norm)[2], attention), _branch(args_of(silu)[1], norm), _branch(args_of(end)[2], silu)]
    for producer, linear, branch in (
        (attention, o, branches[0]),
        (norm, gate_up, branches[1]),
        (silu, down, branches[2]),
    ):
        _alone(producer, linear, branch)
    if not _is_pick(args_of(end)[1], norm, 3) or args_of(end)[4] != eps:
        raise _Refused(f"{end.name} does not go on from the residual of {norm.name}")
    *inputs, _query_start, scale, _quantize_q, decode, _keep, dtype, rotate = args_of(attention)
    rotated = (rotate, args_of(norm)[7], args_of(silu)[4], *args_of(end)[7:])  # what the kernel rotates, per dtype
    wanted = (0, NORM_ROTATES, SILU_ROTATES, NORM_ROTATES) if dtype == torch.int8 else (0,) * 4
    if rotated != wanted[: len(rotated)]:
        raise _Refused("its activations are not rotated as the kernel has it (rotate_activations)")
    if not decode:
        raise _Refused("more than one token a sequence")
    qkv, append = _projection(end)
    branches.append(None if append is None else _branch(args_of(append)[1], end))
    sizes = (int(shape_of(residual)[0]), int(_weight(o)[1]), int(_weight(o)[0]), int(_weight(down)[1]))
    if qkv is not None and fits(*sizes, int(_weight(qkv)[0]), context.sm_count):
        qkv, append, branches[3] = None, None, None
    if qkv is not None:
        _alone(end, qkv, branches[3])
    lora = next((branch for branch in branches if branch is not None), None)
    widths = branches[3].slices if branches[3] is not None else (int(_weight(qkv)[0]), 0, 0) if qkv is not None else ()
    objection = fits(*sizes, sum(widths), context.sm_count)
    if objection is None and context.options.whole_layer == "auto" and sizes[2] // 32 < FEWEST_CTAS * context.sm_count:
        objection = f"{sizes[2] // 32} CTAs on {context.sm_count} SMs would be slower"
    if objection is None and context.options.whole_layer == "auto" and sizes[0] > MOST_TOKENS:
        objection = f"{sizes[0]} tokens: from {MOST_TOKENS + 1} on separate launches are faster"
    if objection is None and lora is not None:
        objection = _lora_objection(branches, context) or with_lora.fits(
            *sizes, widths, int(shape_of(lora.stacks[2])[2]), context.sm_count
        )
    if objection is not None:
        raise _Refused(objection)
    with graph.inserting_before(end):
        rows = insert_call(graph, paged_attention_blocks, (*inputs, scale, dtype), like=attention)
        picked = [insert_call(graph, operator.getitem, (rows, place), like=attention) for place in (0, 1)]
        projection = args_of(qkv)[2:4] if qkv is not None else (None, None)
        arguments = (
            *picked,
            residual,
            *args_of(o)[2:4],
            gain,
            *args_of(gate_up)[2:4],
            *args_of(down)[2:4],
            args_of(end)[3],
            *projection,
        )
        if lora is None:
            block = insert_call(graph, decoder_block, (*arguments, eps), like=down)
        else:
            stacks = ([] if branch is None else list(branch.stacks) for branch in branches)
            block = insert_call(
                graph,
                decoder_block_lora,
                (*arguments, *stacks, _groups(graph, lora.index), list(widths), eps),
                like=down,
            )
        new_residual = insert_call(graph, operator.getitem, (block, 1), like=down)
        if qkv is not None:
            qkv.replace_all_uses_with(insert_call(graph, operator.getitem, (block, 0), like=qkv))
            if append is not None:
                append.update_arg(1, None)
            _replace_picks(end, {3: new_residual})
        else:
            quantized = is_call(end, add_rms_norm_quant)
            keep = args_of(end)[5:]  # empty for add_rms_norm
            final = insert_call(
                graph, rms_norm_quant if quantized else rms_norm, (new_residual, args_of(end)[3], eps, *keep), like=end
            )
            if quantized:
                _replace_picks(
                    end,
                    {
                        **{place: insert_call(graph, operator.getitem, (final, place), like=end) for place in range(3)},
                        3: new_residual,
                    },
                )
            else:
                _replace_picks(end, {0: final, 1: new_residual})


def _branch(delta: fx.Node | None, producer: fx.Node) -> _Branch | None:
    """What a delta is made of; raises unless it is the shrink and expand of what `producer` makes."""
    if delta is None:
        return None
    shrink: Any = args_of(delta)[0] if is_call(delta, lora_expand) else None
    if not is_call(shrink, lora_shrink) or not any(_is_pick(args_of(shrink)[0], producer, place) for place in (0, 1)):
        raise _Refused(f"{delta.name} joins, which is no LoRA delta of the same activation")
    a, order, a_scale, b, slices, b_scale = (
        args_of(shrink)[1],
        args_of(shrink)[2],
        args_of(shrink)[6],
        args_of(delta)[1],
        args_of(delta)[5],
        args_of(delta)[6],
    )
    plan: Any = args_of(order)[0] if is_call(order, operator.getitem) else None
    if not is_call(plan, lora_plan):
        raise _Refused(f"{delta.name} has no lora_plan")
    return _Branch(shrink, (a, a_scale, b, b_scale), args_of(plan)[0], tuple(slices))


def _lora_objection(branches: list[_Branch | None], context: Context) -> str | None:
    """Why the options or the stacks rule out one launch for a layer with LoRA."""
    present = [branch for branch in branches if branch is not None]
    chosen = context.options.lora_lowering
    if chosen != "one_launch":
        return f"a LoRA delta joins between its linears, and lora_lowering is {chosen}"
    if any(stack is None for branch in present for stack in branch.stacks):
        return "its adapters have 16 bits (lora_dtype)"
    if (
        len({branch.index for branch in present}) > 1
        or len({int(shape_of(branch.stacks[2])[2]) for branch in present}) > 1
    ):
        return "its linears have different adapters or ranks"
    return None


def _groups(graph: fx.Graph, index: fx.Node) -> fx.Node:
    """The one `lora_groups` of a graph, in front of everything that might need it."""
    known = next((user for user in index.users if is_call(user, lora_groups)), None)
    if known is not None:
        return known
    first = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_after(index) if index.op != "placeholder" else graph.inserting_before(first):
        return insert_call(graph, lora_groups, (index,), like=index)


def _projection(end: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The q/k/v projection behind a layer, and the append that takes its delta; None for what is not there."""
    if not is_call(end, add_rms_norm_quant):
        return None, None
    found = [user for user in _users(end, 1) if is_call(user, linear_8bit)]
    if len(found) != 1:
        return None, None
    append = next((user for user in found[0].users if is_call(user, rope_append)), None)
    if len(_users(end, 1)) > 1 and append is None:  # its LoRA branch ends where this pass does not know it
        return None, None
    return found[0], append if append is not None and args_of(append)[1] is not None else None


def _linear(producer: fx.Node) -> fx.Node:
    """The one linear that reads a producer's quantized row and scale."""
    found = [user for user in _users(producer, 1) if is_call(user, linear_8bit)]
    if len(found) != 1:
        raise _Refused(f"{producer.name} is read by {len(found)} linears")
    if any(addend is not None for addend in args_of(found[0])[4:6]):
        raise _Refused(f"{found[0].name} adds something to its product")
    return found[0]


def _alone(producer: fx.Node, linear: fx.Node, branch: _Branch | None) -> None:
    """Raises unless nothing but the linear and its LoRA branch reads what `producer` makes, and nothing is added
    within the linear.
    """
    allowed = {linear} if branch is None else {linear, branch.shrink}
    if any(user not in allowed for place in range(3) for user in _users(producer, place)):
        raise _Refused(
            f"{producer.name} is read by something else than one linear (LoRA that joins elsewhere, if the program "
            "has it)"
        )
    if any(addend is not None for addend in args_of(linear)[4:6]):
        raise _Refused(f"{linear.name} adds something to its product")


def _only(node: fx.Node, *ops: Any) -> fx.Node:
    users = list(node.users)
    if len(users) != 1 or not is_call(users[0], *ops) or args_of(users[0])[0] is not node:
        raise _Refused(f"{node.name} is read by something else than {' or '.join(op.name for op in ops)}")
    return users[0]


def _users(node: fx.Node, place: int) -> list[fx.Node]:
    """Who reads result `place` of a node."""
    return [user for pick in node.users if _is_pick(pick, node, place) for user in pick.users]


def _is_pick(node: Any, source: fx.Node, place: int) -> bool:
    return is_call(node, operator.getitem) and args_of(node) == (source, place)


def _weight(linear: fx.Node) -> Any:
    return shape_of(args_of(linear)[2])


def _replace_picks(node: fx.Node, values: dict[int, fx.Node]) -> None:
    for pick in list(node.users):
        if is_call(pick, operator.getitem):
            pick.replace_all_uses_with(values.get(args_of(pick)[1], pick))
