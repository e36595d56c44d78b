"""Lower a static graph to operations on buffers: every result has a buffer, and views are parts of buffers."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..graph.nodes import bind, op_name
from ..graph.recipe import Recipe, param
from .buffers import KINDS, Buffer, ProgramError, View, contiguous_strides


@dataclass
class Operation:
    """A step before scheduling: the op, its arguments, and the buffers that it reads and writes."""

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[View, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    side: bool = False
    sm_share: float | None = None


@dataclass
class Draft:
    """Result of `lower`: operations in graph order, buffers without offsets, outputs, recipes."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()
    single_output: bool = False
    recipes: dict[str, Recipe] = field(default_factory=dict)


def lower(graph: fx.Graph) -> Draft:
    """Lower a graph from `specialize`. Raises ProgramError with the node that has no lowering."""
    return _Lowering().run(graph)


class _Lowering:
    def __init__(self) -> None:
        self.draft = Draft()
        self.homes: dict[int, str] = {}  # a meta tensor's storage -> its buffer

    def run(self, graph: fx.Graph) -> Draft:
        for node in graph.nodes:
            if node.op == "placeholder":
                self._input(node, node.meta.get("kind", "input"), node.meta.get("recipe"))
            elif node.op == "get_attr":
                self._input(node, "weight", param(str(node.target)))
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._output(node)
        return self.draft

    def _input(self, node: fx.Node, kind: str, recipe: Recipe | None) -> None:
        if kind not in KINDS:
            raise ProgramError(f"input {node.name} has the unknown kind {kind!r}")
        value = node.meta["val"]
        self._add_buffer(node.name, kind, value)
        if recipe is not None:
            self.draft.recipes[node.name] = recipe

    def _add_buffer(self, name: str, kind: Any, value: torch.Tensor) -> None:
        shape, stride = tuple(value.shape), value.stride()
        self.draft.buffers[name] = Buffer(
            name, kind, shape, value.dtype, stride=None if stride == contiguous_strides(shape) else tuple(stride)
        )
        self.homes[_storage(value)] = name

    def _view(self, value: torch.Tensor) -> View:
        name = self.homes[_storage(value)]
        dtype = self.draft.buffers[name].dtype
        return View(
            name,
            tuple(value.shape),
            tuple(value.stride()),
            int(value.storage_offset()),
            None if value.dtype == dtype else value.dtype,
        )

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        if isinstance(value, torch.Tensor):
            return self._view(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(entry) for entry in value)
        return value

    def _call(self, node: fx.Node) -> None:
        results = _tensors(node.meta["val"])
        written = _written_arguments(node)
        fresh = [value for value in results if _storage(value) not in self.homes]
        if not fresh and not written:
            return  # not an operation: a view, or a pick of a result
        if not isinstance(node.target, torch._ops.OpOverload):
            raise ProgramError(f"{node.name} calls {op_name(node)}, which is not a registered op")
        if fresh and len(fresh) != len(results):
            raise ProgramError(f"{node.name} = {op_name(node)}(...) returns both new tensors and views of arguments")
        args, kwargs = _by_schema(node)
        arguments = tuple(self._argument(value) for value in args)
        keywords = tuple((name, self._argument(value)) for name, value in kwargs.items())
        inputs, writes = self._buffers_of(node.all_input_nodes), self._buffers_of(written)
        self._place(node.name, fresh)
        outs = tuple(self._view(value) for value in fresh)
        writes.update(view.buffer for view in outs)
        side = node.meta.get("stream") == "side"
        self.draft.operations.append(
            Operation(
                node.name,
                op_name(node),
                arguments,
                keywords,
                outs,
                frozenset(inputs),
                frozenset(writes),
                side,
                node.meta.get("sm_share"),
            )
        )

    def _buffers_of(self, nodes: Iterable[fx.Node]) -> set[str]:
        return {self.homes[_storage(value)] for node in nodes for value in _tensors(node.meta["val"])}

    def _place(self, name: str, fresh: list[torch.Tensor]) -> None:
        """Add a buffer for each new storage: with the tensor's shape if the tensor covers it, else one-dimensional."""
        for index, value in enumerate(fresh):
            if _storage(value) in self.homes:
                continue
            label = name if len(fresh) == 1 else f"{name}.{index}"
            sharing = [other for other in fresh if _storage(other) == _storage(value)]
            if len(sharing) == 1 and value.storage_offset() == 0:
                self._add_buffer(label, "temp", value)
            else:
                elements = math.ceil(value.untyped_storage().nbytes() / value.dtype.itemsize)
                self.draft.buffers[label] = Buffer(label, "temp", (elements,), value.dtype)
                self.homes[_storage(value)] = label

    def _output(self, node: fx.Node) -> None:
        returned = node.args[0]
        self.draft.single_output = not isinstance(returned, (tuple, list))
        values = (returned,) if self.draft.single_output else tuple(returned)  # type: ignore[arg-type]
        outputs = tuple(self._argument(value) for value in values)
        for view in outputs:
            if isinstance(view, View) and self.draft.buffers[view.buffer].kind == "temp":
                self.draft.buffers[view.buffer] = replace(self.draft.buffers[view.buffer], kind="output")
        self.draft.outputs = outputs


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [entry for entry in value if isinstance(entry, torch.Tensor)] if isinstance(value, (tuple, list)) else []


def _written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that the op writes in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            fx.map_arg(getattr(bind(node), argument.name), written.append)
    return written


def _by_schema(node: fx.Node) -> tuple[list[Any], Mapping[str, Any]]:
    """Return arguments in the schema's order, with defaults up to the last given one, and keyword-only arguments."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    positional = [argument for argument in arguments if not argument.kwarg_only]
    args, kwargs = list(node.args), dict(node.kwargs)
    own = op_name(node).startswith("sidestream.")
    while len(args) < len(positional) and (own or any(argument.name in kwargs for argument in positional[len(args) :])):
        name = positional[len(args)].name
        try:
            args.append(getattr(bind(node), name))
        except AttributeError as error:
            raise ProgramError(f"{node.name} can't be lowered: {error}") from error
        kwargs.pop(name, None)
    return args, kwargs
