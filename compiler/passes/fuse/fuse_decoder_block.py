"""The linears between two attentions -> `sidestream.decoder_block`, one launch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ....ops.attention.paged_attention import paged_attention_quant
from ....ops.attention.paged_attention_blocks import paged_attention_blocks
from ....ops.attention.rope_append import rope_append
from ....ops.core.registry import Op
from ....ops.decoder_block.decoder_block import decoder_block, fits
from ....ops.elementwise.quantize import SILU_ROTATES
from ....ops.elementwise.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from ....ops.elementwise.silu_mul import silu_mul_quant
from ....ops.linear.linear_8bit import linear_8bit
from ....ops.moe.route import moe_route
from ...graph.nodes import (
    bind,
    calls,
    has_operand,
    insert_call,
    insert_picks,
    is_call,
    is_pick,
    replace_picks,
    shape_of,
)
from ..base import Context, PassReport, Refused, rewrite_each
from .quantize_in_blocks import blocks_arguments, has_few_rows

MOST_TOKENS = 32  # from 33 on separate launches are faster on an H200
FEWEST_CTAS = 0.75  # share of the SMs that the kernel must occupy: with fewer it does not saturate the memory


def fuse_decoder_block(graph: fx.Graph, context: Context) -> PassReport:
    """Fuse all linears between two attentions of a decode step into one persistent launch.

    before  _, q, s = paged_attention_quant(...); o = linear_8bit(q, s, ...)
            _, q, s, r = add_rms_norm_quant(o, residual, ...); up = linear_8bit(q, s, ...)
            _, q, s = silu_mul_quant(up, ...); down = linear_8bit(q, s, ...)
            _, q, s, r = add_rms_norm_quant(down, r, ...); qkv = linear_8bit(q, s, ...)
    after   q, s = paged_attention_blocks(...); qkv, r = decoder_block(q, s, residual, ...)

    After the last layer there is no q/k/v: the block ends with the residual, the final norm stays. Activations have one
    scale per token and 128 columns. Matches attention of one token per sequence, or a few in steps with drafts. Leaves
    layers with LoRA or experts, results with other readers, sizes that the kernel does not support, and with
    whole_layer="auto" sizes that are not faster.
    """
    if context.options.whole_layer == "off":
        return PassReport(0)

    def fuse(attention: fx.Node) -> None:
        layer = _layer(attention, context)
        objection = _objection(layer, context)
        if objection is not None:
            raise Refused(objection)
        _replace(graph, layer)

    return rewrite_each(calls(graph, paged_attention_quant), fuse)


@dataclass(frozen=True)
class _Layer:
    """The calls between one attention and the next; `qkv` is the next layer's projection, None if it stays separate."""

    attention: fx.Node
    o: fx.Node
    norm: fx.Node
    gate_up: fx.Node
    silu: fx.Node
    down: fx.Node
    end: fx.Node
    qkv: fx.Node | None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Number of tokens, and columns of attention's output, of the residual stream and of the MLP."""
        attention, stream, mlp = _weight(self.o)[1], _weight(self.o)[0], _weight(self.down)[1]
        return int(shape_of(bind(self.norm).residual)[0]), int(attention), int(stream), int(mlp)

    def fits(self, context: Context, with_qkv: bool) -> str | None:
        """Return None if the kernel supports these sizes, else the reason."""
        last = int(_weight(self.qkv)[0]) if with_qkv and self.qkv is not None else 0
        return fits(*self.sizes, last, context.sm_count)


def _layer(attention: fx.Node, context: Context) -> _Layer:
    """Follow a layer from its attention on. Raises Refused for a layer that the kernel does not compute."""
    o = _linear(attention)
    norm = _only_reader(o, "x", add_rms_norm_quant)
    gate_up = _linear(norm)
    silu = _only_reader(gate_up, "gate_up", silu_mul_quant)
    down = _linear(silu)
    end = _only_reader(down, "x", add_rms_norm_quant, add_rms_norm)
    for joining in (norm, silu, end):
        _without_lora(bind(joining).delta)
    for producer, linear in ((attention, o), (norm, gate_up), (silu, down)):
        _check_only_reader(producer, linear)
    if not is_pick(bind(end).residual, norm, 3) or bind(end).eps != bind(norm).eps:
        raise Refused(f"{end.name} does not add to the residual of {norm.name}")
    _check_rotations(attention, norm, silu, end)
    if not has_few_rows(attention):
        raise Refused("more than one token per sequence")
    qkv, delta = _projection(end)
    layer = _Layer(attention, o, norm, gate_up, silu, down, end, qkv)
    if qkv is not None and layer.fits(context, with_qkv=True):
        layer = replace(layer, qkv=None)
    if layer.qkv is not None:
        _without_lora(delta)
        _check_only_reader(end, layer.qkv)
    return layer


def _check_rotations(attention: fx.Node, norm: fx.Node, silu: fx.Node, end: fx.Node) -> None:
    """Raise Refused unless activations are rotated as in the kernel for their dtype."""
    rotated = [bind(node).rotate for node in (attention, norm, silu, end) if has_operand(node, "rotate")]
    is_int8 = bind(attention).dtype == torch.int8
    columns = bind(norm).rotate
    wanted = [0, columns, SILU_ROTATES, columns] if is_int8 else [0] * 4
    if rotated != wanted[: len(rotated)] or (is_int8 and not columns):
        raise Refused("its activations are not rotated as in the kernel (rotate_activations)")


def _objection(layer: _Layer, context: Context) -> str | None:
    """Return the reason not to fuse a layer (its sizes, or slower), or None."""
    objection = layer.fits(context, with_qkv=True)
    if objection is not None or context.options.whole_layer != "auto":
        return objection
    tokens, _, stream, _ = layer.sizes
    if stream // 32 < FEWEST_CTAS * context.sm_count:
        return f"{stream // 32} CTAs on {context.sm_count} SMs would be slower"
    if tokens > MOST_TOKENS:
        return f"{tokens} tokens: from {MOST_TOKENS + 1} on separate launches are faster"
    return None


def _replace(graph: fx.Graph, layer: _Layer) -> None:
    """Replace the layer's calls by the block; readers of the layer's last norm then read the block."""
    end, norm = bind(layer.end), bind(layer.norm)
    with graph.inserting_before(layer.end):
        rows = insert_call(graph, paged_attention_blocks, blocks_arguments(layer.attention), like=layer.attention)
        operands = (
            *insert_picks(graph, rows, (0, 1), like=layer.attention),
            norm.residual,
            *_weights(layer.o),
            norm.weight,
            *_weights(layer.gate_up),
            *_weights(layer.down),
            end.weight,
            *(_weights(layer.qkv) if layer.qkv is not None else (None, None)),
            norm.eps,
            *((norm.rotate,) if norm.rotate else ()),
        )
        block = insert_call(graph, decoder_block, operands, like=layer.down)
        (residual,) = insert_picks(graph, block, (1,), like=layer.down)
        if layer.qkv is not None:
            layer.qkv.replace_all_uses_with(insert_picks(graph, block, (0,), like=layer.qkv)[0])
            replace_picks(layer.end, {3: residual})
        elif is_call(layer.end, add_rms_norm_quant):
            form = (end.keep, end.dtype, end.rotate)
            final = insert_call(graph, rms_norm_quant, (residual, end.weight, norm.eps, *form), like=layer.end)
            picks = insert_picks(graph, final, range(3), like=layer.end)
            replace_picks(layer.end, {**dict(enumerate(picks)), 3: residual})
        else:
            final = insert_call(graph, rms_norm, (residual, end.weight, norm.eps), like=layer.end)
            replace_picks(layer.end, {0: final, 1: residual})


def _without_lora(delta: fx.Node | None) -> None:
    """Raise Refused for a product with a delta."""
    if delta is not None:
        raise Refused(f"a LoRA delta is added between its linears ({delta.name})")


def _projection(end: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Return (the q/k/v projection after a layer, the LoRA delta that its append adds); None for missing ones."""
    if not is_call(end, add_rms_norm_quant):
        return None, None
    found = [user for user in _users(end, 1) if is_call(user, linear_8bit)]
    if len(found) != 1:
        return None, None
    append = next((user for user in found[0].users if is_call(user, rope_append)), None)
    if len(_users(end, 1)) > 1 and append is None:  # a LoRA branch may be added by another op
        return None, None
    return found[0], None if append is None else bind(append).delta


def _linear(producer: fx.Node) -> fx.Node:
    """Return the only linear that reads a producer's quantized row and scale."""
    found = [user for user in _users(producer, 1) if is_call(user, linear_8bit)]
    if any(is_call(user, moe_route) for user in _users(producer, 0)):
        raise Refused("its MLP is a mixture of experts")
    if len(found) != 1:
        raise Refused(f"{producer.name} is read by {len(found)} linears")
    _check_plain(found[0])
    return found[0]


def _check_only_reader(producer: fx.Node, linear: fx.Node) -> None:
    """Raise Refused unless the linear is the only reader of `producer` and adds nothing to its product."""
    if any(user is not linear for place in range(3) for user in _users(producer, place)):
        raise Refused(f"{producer.name} has other readers than one linear (such as LoRA, if another op adds its delta)")
    _check_plain(linear)


def _check_plain(linear: fx.Node) -> None:
    """Raise Refused for a linear with a delta or a residual."""
    if bind(linear).delta is not None or bind(linear).residual is not None:
        raise Refused(f"{linear.name} adds something to its product")


def _only_reader(node: fx.Node, operand: str, *ops: Op) -> fx.Node:
    """Return the only reader of a linear's product: a call of one of `ops` with the product as `operand`."""
    users = list(node.users)
    if len(users) != 1 or not is_call(users[0], *ops) or getattr(bind(users[0]), operand) is not node:
        raise Refused(f"{node.name} has other readers than one {' or '.join(op.name for op in ops)}")
    return users[0]


def _users(node: fx.Node, place: int) -> list[fx.Node]:
    """Return the readers of result `place` of a node."""
    return [user for pick in node.users if is_pick(pick, node, place) for user in pick.users]


def _weight(linear: fx.Node) -> Any:
    return shape_of(bind(linear).weight)


def _weights(linear: fx.Node) -> tuple[fx.Node, fx.Node]:
    return bind(linear).weight, bind(linear).weight_scale
