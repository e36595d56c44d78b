"""The linears between two attentions -> `sidestream.decoder_block`, one launch."""

import operator
from typing import Any

import torch
from torch import fx

from ...ops.attention.paged_attention import paged_attention_quant
from ...ops.attention.paged_attention_blocks import paged_attention_blocks
from ...ops.attention.rope_append import rope_append
from ...ops.decoder_block.decoder_block import decoder_block, fits
from ...ops.linear.linear_8bit import linear_8bit
from ...ops.rows.quantize import NORM_ROTATES, SILU_ROTATES
from ...ops.rows.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from ...ops.rows.silu_mul import silu_mul_quant
from ..graph.nodes import args_of, insert_call, is_call, shape_of
from .base import Context, PassReport

MOST_TOKENS = 32  # from 33 on separate launches are faster on an H200
FEWEST_CTAS = 0.75  # share of the SMs that the kernel must occupy to be worth it: fewer can't saturate the memory


class _Refused(Exception):
    """Why a layer is left alone."""


def fuse_decoder_block(graph: fx.Graph, context: Context) -> PassReport:
    """o, the norms, gate_up, SiLU * mul, down and the next layer's q/k/v of a decode step become one persistent launch.

    before  _, q, s = paged_attention_quant(...); o = linear_8bit(q, s, ...); _, q, s, r = add_rms_norm_quant(o,
            residual, ...); up = linear_8bit(q, s, ...) _, q, s = silu_mul_quant(up); down = linear_8bit(q, s, ...); _,
            q, s, r = add_rms_norm_quant(down, r, ...); qkv = linear_8bit(q, s, ...)
    after   q, s = paged_attention_blocks(...); qkv, r = decoder_block(q, s, residual, ...)

    After the last layer there is no q/k/v: the block ends with the residual, the final norm stays. Activations have one
    scale per token and 128 columns. For graphs with static sizes. Leaves layers with LoRA, sizes that the kernel
    doesn't take, and with whole_layer="auto" those where it wins nothing.
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
    for delta in (args_of(norm)[2], args_of(silu)[1], args_of(end)[2]):
        _without_lora(delta)
    for producer, linear in ((attention, o), (norm, gate_up), (silu, down)):
        _alone(producer, linear)
    if not _is_pick(args_of(end)[1], norm, 3) or args_of(end)[4] != eps:
        raise _Refused(f"{end.name} does not go on from the residual of {norm.name}")
    *inputs, _query_start, scale, _quantize_q, decode, _keep, dtype, rotate = args_of(attention)
    rotated = (rotate, args_of(norm)[7], args_of(silu)[4], *args_of(end)[7:])  # what the kernel rotates, per dtype
    wanted = (0, NORM_ROTATES, SILU_ROTATES, NORM_ROTATES) if dtype == torch.int8 else (0,) * 4
    if rotated != wanted[: len(rotated)]:
        raise _Refused("its activations are not rotated as the kernel has it (rotate_activations)")
    if not decode:
        raise _Refused("more than one token a sequence")
    qkv, delta = _projection(end)
    sizes = (int(shape_of(residual)[0]), int(_weight(o)[1]), int(_weight(o)[0]), int(_weight(down)[1]))
    if qkv is not None and fits(*sizes, int(_weight(qkv)[0]), context.sm_count):
        qkv = None
    if qkv is not None:
        _without_lora(delta)
        _alone(end, qkv)
    objection = fits(*sizes, 0 if qkv is None else int(_weight(qkv)[0]), context.sm_count)
    if objection is None and context.options.whole_layer == "auto" and sizes[2] // 32 < FEWEST_CTAS * context.sm_count:
        objection = f"{sizes[2] // 32} CTAs on {context.sm_count} SMs would be slower"
    if objection is None and context.options.whole_layer == "auto" and sizes[0] > MOST_TOKENS:
        objection = f"{sizes[0]} tokens: from {MOST_TOKENS + 1} on separate launches are faster"
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
        block = insert_call(graph, decoder_block, (*arguments, eps), like=down)
        new_residual = insert_call(graph, operator.getitem, (block, 1), like=down)
        if qkv is not None:
            qkv.replace_all_uses_with(insert_call(graph, operator.getitem, (block, 0), like=qkv))
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


def _without_lora(delta: fx.Node | None) -> None:
    """Raises when a linear's product gets a delta."""
    if delta is not None:
        raise _Refused(f"a LoRA delta joins between its linears ({delta.name})")


def _projection(end: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The q/k/v projection after a layer and the LoRA delta that its append adds to it; None for what is not there."""
    if not is_call(end, add_rms_norm_quant):
        return None, None
    found = [user for user in _users(end, 1) if is_call(user, linear_8bit)]
    if len(found) != 1:
        return None, None
    append = next((user for user in found[0].users if is_call(user, rope_append)), None)
    if len(_users(end, 1)) > 1 and append is None:  # its LoRA branch ends where this pass does not know it
        return None, None
    return found[0], None if append is None else args_of(append)[1]


def _linear(producer: fx.Node) -> fx.Node:
    """The one linear that reads a producer's quantized row and scale."""
    found = [user for user in _users(producer, 1) if is_call(user, linear_8bit)]
    if len(found) != 1:
        raise _Refused(f"{producer.name} is read by {len(found)} linears")
    if any(addend is not None for addend in args_of(found[0])[4:6]):
        raise _Refused(f"{found[0].name} adds something to its product")
    return found[0]


def _alone(producer: fx.Node, linear: fx.Node) -> None:
    """Raises unless the linear alone reads what `producer` makes, and adds nothing to its product."""
    if any(user is not linear for place in range(3) for user in _users(producer, place)):
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
