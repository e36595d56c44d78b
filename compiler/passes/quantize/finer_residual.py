"""The residual stream in fp16 instead of bf16."""

from dataclasses import dataclass, field

import torch
from torch import fx

from ....ops.elementwise.embedding import embedding
from ....ops.elementwise.residual_values import residual_values
from ....ops.elementwise.rms_norm import add_rms_norm, rms_norm
from ...graph.nodes import VIEWS, aten, bind, calls, insert_call, is_call, is_check, op_name, picks_of, set_operands
from ..base import Context, PassReport, Refused, rewrite_each

STREAM = torch.float16
NEW_RESIDUAL = 1  # index of the new residual in the results of `add_rms_norm`


def finer_residual(graph: fx.Graph, context: Context) -> PassReport:
    """Store the residual stream of an int8 model in fp16, divided by 16, with eight times finer steps than bf16.

    before  x = sidestream.embedding(input_ids, weight); y = sidestream.rms_norm(x, gain, 1e-05); ...
            y, r = sidestream.add_rms_norm(o, x, None, gain, 1e-05)
    after   x = sidestream.embedding(input_ids, weight, torch.float16); y = sidestream.rms_norm(x, gain, 1e-05); ...
            y, r = sidestream.add_rms_norm(o, x, None, gain, 1e-05)  # r in fp16, y in bf16 as before

    The stream is rounded at every sum. Values beyond 1,048,064 are clamped. It takes no extra bytes or launches, except
    one small launch for each value that the graph returns (features of a trained draft) to convert it to bf16. Matches
    a bf16 stream from an embedding, read only by norms and by sums before norms. Leaves streams with any other reader.
    """
    if context.options.precision != "int8" or not context.options.finer_residual:
        return PassReport(0)
    return rewrite_each(calls(graph, embedding), lambda start: _convert(graph, start, _follow(start)))


@dataclass
class _Stream:
    """A residual stream, starting at its embedding.

    values   nodes of the stream: the embedding, scaled, selected or viewed rows, and picks of new residuals
    sums     additions to it
    swapped  sums with the stream as `x`
    outputs  values that the graph returns
    """

    values: dict[fx.Node, None] = field(default_factory=dict)
    sums: dict[fx.Node, None] = field(default_factory=dict)
    swapped: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


def _follow(start: fx.Node) -> _Stream:
    """Return all nodes of the stream. Raises Refused for an unknown reader."""
    if start.meta["val"].dtype != torch.bfloat16:
        raise Refused(f"the stream is {start.meta['val'].dtype}, not torch.bfloat16")
    if bind(start).stream_dtype is not None:
        raise Refused("its stream_dtype is set already")
    stream, waiting = _Stream(), [start]
    while waiting:
        value = waiting.pop()
        stream.values[value] = None
        for user in value.users:
            waiting += [each for each in _next_values(stream, start, value, user) if each not in stream.values]
    if not stream.sums:
        raise Refused("nothing is added to it before a norm")
    for each in stream.sums:
        both = [name for name in ("x", "residual", "delta") if getattr(bind(each), name) in stream.values]
        if len(both) != 1 or both == ["delta"]:
            raise Refused(f"{each.name} reads it as {' and '.join(both)}")
        if both == ["x"]:
            stream.swapped.append(each)
    return stream


def _next_values(stream: _Stream, start: fx.Node, value: fx.Node, user: fx.Node) -> list[fx.Node]:
    """Return the nodes of the stream that `user` computes from `value`. Raises Refused for an unknown reader."""
    if user.op == "output":
        stream.outputs.append(value)
        return []
    if is_check(user):
        return []
    if is_call(user, add_rms_norm):
        _check_gain(user)
        stream.sums[user] = None
        return [pick for place, pick in picks_of(user) if place == NEW_RESIDUAL]
    if is_call(user, rms_norm) and bind(user).x is value:
        _check_gain(user)
        return []
    if user.op == "call_function" and (user.target in VIEWS or is_call(user, aten.index_select.default)):
        return [user]
    if value is start and is_call(user, aten.mul.Tensor) and isinstance(bind(user).other, int | float):
        return [user]  # Granite's multiplier of the embedding
    raise Refused(f"{user.name} ({op_name(user)}) reads it")


def _check_gain(norm: fx.Node) -> None:
    dtype = bind(norm).weight.meta["val"].dtype
    if dtype != torch.bfloat16:
        raise Refused(f"the weight of {norm.name} is {dtype}, not torch.bfloat16")


def _convert(graph: fx.Graph, start: fx.Node, stream: _Stream) -> None:
    for node in stream.swapped:
        set_operands(node, x=bind(node).residual, residual=bind(node).x)
    set_operands(start, stream_dtype=STREAM)
    for node in stream.values:
        node.meta["val"] = node.meta["val"].to(STREAM)
    for node in stream.sums:
        normed, residual = node.meta["val"]
        node.meta["val"] = (normed, residual.to(STREAM))
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for value in dict.fromkeys(stream.outputs):
        with graph.inserting_before(output):
            plain = insert_call(graph, residual_values, (value, torch.bfloat16), like=value)
        output.replace_input_with(value, plain)
