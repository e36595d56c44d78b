"""One spelling for operations that PyTorch spells in several ways."""

import operator
from typing import Any

import torch
from torch import fx

from ...graph.nodes import CASTS, aten, bind, insert_call, is_call, is_check, shape_of
from ..base import Context, PassReport

_IDENTITIES = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.clone.default)


def normalize(graph: fx.Graph, context: Context) -> PassReport:
    """Remove no-ops and default arguments, and turn parts of chunks into slices.

    before  to_3 = aten.to.dtype(x, torch.float32)      # x is fp32 already
            slice_1 = aten.slice.Tensor(to_3, 1, 0, 9223372036854775807)
    after   (users read x)

    No-ops are casts to the same dtype, full slices, `+ 0`, dropout in evaluation, empty parts of concatenations and
    metadata checks. Leaves casts between devices.
    """
    removed = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if is_check(node):
            graph.erase_node(node)
            removed += 1
            continue
        _drop_defaults(node)
        source = _same_as(node) or _only_part(node) or _slice_of_chunk(graph, node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            removed += 1
    return PassReport(removed)


def _same_as(node: fx.Node) -> fx.Node | None:
    """Return the argument that a no-op returns unchanged; None for other nodes."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    old, new = source.meta.get("val"), node.meta.get("val")
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return None
    if node.target in CASTS:
        same = old.dtype == new.dtype and old.device == new.device
    elif node.target in _IDENTITIES:
        same = node.target is not aten.clone.default or "memory_format" not in node.kwargs
    elif is_call(node, aten.contiguous.default):
        same = old.is_contiguous()
    elif is_call(node, aten.dropout.default):
        same = bind(node).train is False or bind(node).p == 0
    elif is_call(node, aten.add.Tensor):
        addend = bind(node).other
        same = isinstance(addend, int | float) and addend == 0 and old.dtype == new.dtype
    elif is_call(node, aten.slice.Tensor):
        same = _is_full_slice(node)
    else:
        same = is_call(node, aten.type_as.default) and old.dtype == new.dtype
    return source if same else None


def _only_part(node: fx.Node) -> fx.Node | None:
    """Return the only nonempty tensor of a concatenation; None if there are several."""
    if not is_call(node, aten.cat.default):
        return None
    full = [part for part in bind(node).tensors if 0 not in shape_of(part)]
    return full[0] if len(full) == 1 and shape_of(full[0]) == shape_of(node) else None


def _slice_of_chunk(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Insert and return a slice that replaces a part of a chunk; None for other nodes."""
    if not is_call(node, operator.getitem) or not is_call(bind(node).source, aten.chunk.default, aten.split.Tensor):
        return None
    whole, place = bind(node).source, bind(node).place
    dim = bind(whole).dim
    widths = [part.shape[dim] for part in whole.meta["val"]]
    start = sum(widths[:place])
    with graph.inserting_before(node):
        return insert_call(graph, aten.slice.Tensor, (bind(whole).self, dim, start, start + widths[place]), like=node)


def _is_full_slice(node: fx.Node) -> bool:
    cut = bind(node)
    if cut.start not in (0, None) or cut.step != 1:
        return False
    width = shape_of(cut.self)[cut.dim]
    return cut.end is None or cut.end == 2**63 - 1 or (isinstance(width, int) and cut.end == width)


def _drop_defaults(node: fx.Node) -> None:
    """Drop arguments that equal the schema's default, so that a pattern needs only the short form."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    arguments = node.target._schema.arguments
    kwargs = {
        name: value
        for name, value in node.kwargs.items()
        if not _is_default(next(a for a in arguments if a.name == name), value)
    }
    args = list(node.args)
    while args and arguments[len(args) - 1].has_default_value() and _is_default(arguments[len(args) - 1], args[-1]):
        args.pop()
    node.args = tuple(args)
    node.kwargs = kwargs


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value() or isinstance(value, fx.Node):
        return False
    default = argument.default_value
    return type(value) is type(default) and bool(value == default)
