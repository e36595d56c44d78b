"""Queries and edits of FX nodes: views, arguments by name, new nodes with fake values, replacement."""

import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from ...ops.core.registry import NAMESPACE, OPS, Op
from ...ops.lora.lora import lora
from ...ops.moe.expert_lora import expert_lora
from ...ops.moe.plan import group_plan

aten = torch.ops.aten
DELTAS = (lora, expert_lora)
"""Semantic ops of LoRA."""

CASTS: frozenset[Any] = frozenset({aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout, aten.to.device})
VIEWS: frozenset[Any] = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.unflatten.int,
        aten.flatten.using_ints,
    }
)
RESHAPES: frozenset[Any] = frozenset(
    {aten.view.default, aten.reshape.default, aten.unflatten.int, aten.flatten.using_ints}
)


CHECKS = frozenset(
    {
        "_assert_tensor_metadata",
        "_assert_scalar",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "_assert_async",
    }
)


class Refused(Exception):
    """A rewrite does not apply to a node; the message is the reason."""


def is_check(node: fx.Node) -> bool:
    """Return whether a node only asserts a property that held during tracing."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.split("::")[1] in CHECKS


_REQUIRED = object()  # marks an argument without a default


@cache
def _parameters(target: Any) -> dict[str, Any]:
    """Return argument name -> default of an overload; for a pick of a result, `source` and `place`."""
    if target is operator.getitem:
        return {"source": _REQUIRED, "place": _REQUIRED}
    if not isinstance(target, torch._ops.OpOverload):
        return {}
    if target.namespace == NAMESPACE:  # dtypes are numbers in the schema, but dtypes in the signature
        own = signature(OPS[target._opname].reference).parameters
        return {name: _REQUIRED if each.default is each.empty else each.default for name, each in own.items()}
    arguments = target._schema.arguments
    return {each.name: each.default_value if each.has_default_value() else _REQUIRED for each in arguments}


class Bound:
    """A call's arguments as attributes: `bind(norm).residual`; names and defaults are those of the op's schema."""

    def __init__(self, node: fx.Node) -> None:
        self._node, self._parameters = node, _parameters(node.target)
        self._given = {**dict(zip(self._parameters, node.args, strict=False)), **node.kwargs}

    def __getattr__(self, name: str) -> Any:
        if name not in self._parameters:
            raise self.unknown(name)
        value = self._given.get(name, self._parameters[name])
        if value is _REQUIRED:
            raise AttributeError(f"{op_name(self._node)} ({self._node.name}) has no value for its argument {name!r}")
        return value

    def unknown(self, name: str) -> AttributeError:
        """Return the error for an unknown argument name."""
        names = ", ".join(self._parameters) or "no named arguments"
        return AttributeError(f"{op_name(self._node)} ({self._node.name}) has no argument {name!r}; it has {names}")

    def names_of(self, operand: fx.Node) -> list[str]:
        """Return the names of the arguments with the value `operand`."""
        return [name for name, value in self._given.items() if value is operand]


def bind(node: fx.Node) -> Bound:
    """Return the arguments of a call by name."""
    return Bound(node)


def has_operand(node: fx.Node, name: str) -> bool:
    """Return whether a node calls an op with an argument of this name."""
    return node.op == "call_function" and name in _parameters(node.target)


def set_operands(node: fx.Node, **values: Any) -> None:
    """Replace arguments of a call by name; missing positional arguments before them get their defaults.

    Raises AttributeError for an unknown name.
    """
    bound, names = bind(node), list(_parameters(node.target))
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in values.items():
        if name not in names:
            raise bound.unknown(name)
        if name in kwargs or _is_keyword(node.target, name):
            kwargs[name] = value
            continue
        for between in names[len(args) : names.index(name) + 1]:
            args.append(value if between == name else getattr(bound, between))
            kwargs.pop(between, None)
        args[names.index(name)] = value
    node.args, node.kwargs = tuple(args), kwargs


def operands_for(node: fx.Node, op: Op, **more: Any) -> tuple[Any, ...]:
    """Return arguments for a call of `op` that replaces the call `node`.

    Each argument is the one in `more`, else the node's argument of the same name, else the default. Trailing defaults
    are omitted. Raises AttributeError for a missing argument without a default.
    """
    bound, own = bind(node), _parameters(node.target)
    names = list(_parameters(op.overload).items())
    values = [
        more[name]
        if name in more
        else default
        if default is not _REQUIRED and name not in own
        else getattr(bound, name)
        for name, default in names
    ]
    while values and names[len(values) - 1][0] not in more and values[-1] == names[len(values) - 1][1]:
        values.pop()
    return tuple(values)


def _is_keyword(target: Any, name: str) -> bool:
    return isinstance(target, torch._ops.OpOverload) and any(
        each.kwarg_only for each in target._schema.arguments if each.name == name
    )


def is_call(node: Any, *targets: Any) -> bool:
    """Return whether `node` is a call of one of `targets` (overloads or registered ops)."""
    wanted = [target.overload if isinstance(target, Op) else target for target in targets]
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in wanted


def calls(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """Yield the calls of `targets` (overloads or registered ops); the graph may change between them."""
    return (node for node in list(graph.nodes) if is_call(node, *targets))


def is_kernel(node: fx.Node) -> bool:
    """Return whether a node launches a kernel: a call other than a view, a pick of a result, a check or a size."""
    if node.op != "call_function" or node.target in VIEWS or node.target is operator.getitem or is_check(node):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or "sym_" not in node.target.name()


def op_name(node: fx.Node) -> str:
    """Return the op's name: `sidestream.rms_norm` or `aten.add.Tensor`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name.removesuffix(".default") if name.startswith(NAMESPACE) else name
    return getattr(target, "__name__", str(target))


def value_of(argument: Any) -> Any:
    """Return the fake value of a node (or the nodes of a list); anything else unchanged."""
    return fx.map_arg(argument, lambda node: node.meta["val"])


def shape_of(node: fx.Node) -> torch.Size:
    """Return the (possibly symbolic) shape of a node's tensor."""
    return node.meta["val"].shape


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """Return the mode of the graph's fake tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def _value_mode(graph: fx.Graph, inputs: Any) -> AbstractContextManager[Any]:
    """Return the context for values computed from `inputs`: their fake mode, or no mode for meta tensors of a
    specialized graph. Without a tensor among them, the first one of the graph decides; a search of the whole graph for
    each new node would take longer than the passes.
    """
    for values in (pytree.tree_leaves(inputs), (node.meta.get("val") for node in graph.nodes)):
        for value in values:
            if isinstance(value, FakeTensor):
                return value.fake_mode
            if isinstance(value, torch.Tensor) and value.is_meta:
                return nullcontext()
    raise ValueError("the graph holds no fake tensors; capture it first")


_shared: ContextVar[dict[Hashable, Any] | None] = ContextVar("_shared", default=None)


@contextmanager
def shared_values(values: dict[Hashable, Any]) -> Iterator[None]:
    """Let inserted calls with equal inputs, as in each layer, share one fake value, which is only read."""
    token = _shared.set(values)
    try:
        yield
    finally:
        _shared.reset(token)


def _call_value(graph: fx.Graph, target: Any, inputs: tuple[Any, ...]) -> Any:
    """Return the fake result of a call."""
    with _value_mode(graph, inputs) as mode, torch.no_grad():
        shared = _shared.get()
        if shared is None or not isinstance(target, torch._ops.OpOverload):
            return target(*inputs)
        key = mode, target, _described(inputs)
        if key not in shared:
            shared[key] = target(*inputs)
        return shared[key]


def _described(value: Any) -> Hashable:
    """Return a key of a call's input: what the metadata of the call's result can depend on."""
    if isinstance(value, torch.Tensor):
        sizes = value.shape, value.stride(), value.storage_offset()
        return "tensor", value.dtype, value.device, value.requires_grad, *map(_described, sizes)
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    symbol = getattr(value, "node", None)
    return (type(value), value) if symbol is None else ("symbol", symbol.expr)


def insert_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node | None = None) -> fx.Node:
    """Insert a call at the graph's insertion point, compute its fake value, and copy source information from `like`."""
    if isinstance(target, Op):
        target = target.overload
    node = graph.create_node("call_function", target, args, name=getattr(target, "_opname", None))
    node.meta["val"] = _call_value(graph, target, value_of(args))
    if like is not None:
        for key in ("stack_trace", "nn_module_stack"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
    return node


def erase_unused(graph: fx.Graph) -> None:
    """Remove calls without effect and without a reader.

    torch's `eliminate_dead_code` checks every node for effects, which takes as long as the passes.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def insert_picks(graph: fx.Graph, node: fx.Node, places: Iterable[int], like: fx.Node | None = None) -> list[fx.Node]:
    """Insert picks of the results at `places` of a call."""
    return [insert_call(graph, operator.getitem, (node, place), like=like or node) for place in places]


def is_pick(node: Any, source: fx.Node, place: int) -> bool:
    """Return whether `node` picks result `place` of `source`."""
    return is_call(node, operator.getitem) and bind(node).source is source and bind(node).place == place


def picks_of(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """Return (place, pick) of every pick of a call's results."""
    return [(bind(user).place, user) for user in node.users if is_call(user, operator.getitem)]


def replace_picks(node: fx.Node, values: Mapping[int, fx.Node]) -> None:
    """Replace readers' result `place` of a call by `values[place]`; other results stay."""
    for place, pick in picks_of(node):
        if place in values:
            pick.replace_all_uses_with(values[place])


def copy_marks(source: fx.Node, *nodes: fx.Node) -> None:
    """Copy the lane and SM share of `source` to new nodes."""
    for node in nodes:
        node.meta.update({key: source.meta[key] for key in ("stream", "sm_share") if key in source.meta})


def insert_placeholder(
    graph: fx.Graph, name: str, kind: str, shape: tuple[Any, ...], dtype: torch.dtype, after: fx.Node, **meta: Any
) -> fx.Node:
    """Insert a graph input of `kind` ("input", "weight" or "adapter") after the placeholder `after`."""
    mode = fake_mode_of(graph)
    if mode is None:
        raise ValueError("the graph holds no fake tensors; capture it first")
    with graph.inserting_after(after), mode:
        node = graph.placeholder(name)
        node.meta.update(val=torch.empty(shape, dtype=dtype, device=after.meta["val"].device), kind=kind, **meta)
    return node


def last_placeholder(graph: fx.Graph) -> fx.Node:
    """Return the graph's last input."""
    return [node for node in graph.nodes if node.op == "placeholder"][-1]


def through_views(node: Any) -> Any:
    """Return the source of any number of reshapes."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target in RESHAPES:
        node = bind(node).self
    return node


def split_delta(value: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Split `linear + lora` into (linear, lora); return (node, None) for any other node.

    Consumers add the pair themselves, so that a base GEMM never waits for the side stream.
    """
    if is_call(value, aten.add.Tensor):
        first, second = bind(value).self, bind(value).other
        for base, delta in ((first, second), (second, first)):
            if is_call(through_views(delta), *DELTAS):
                return base, delta
    return value, None


def group_plan_of(node: fx.Node) -> fx.Node | None:
    """Return the plan of pairs that a node is or reads."""
    if is_call(node, group_plan):
        return node
    names = [name for name in ("order", "token_order") if has_operand(node, name)]
    order: Any = getattr(bind(node), names[0]) if names else None
    plan = bind(order).source if is_call(order, operator.getitem) else None
    return plan if is_call(plan, group_plan) else None


def split_bias(value: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Split `linear + bias` into (linear, bias) for a loaded bias vector; return (node, None) for any other node."""
    if is_call(value, aten.add.Tensor) and bind(value).alpha == 1:
        base, bias = bind(value).self, bind(value).other
        if isinstance(bias, fx.Node) and bias.meta.get("kind") == "weight" and len(shape_of(bias)) == 1:
            return base, bias
    return value, None


def slice_range(node: Any) -> tuple[fx.Node, int, int] | None:
    """Return (source, start, end) of a slice of the last dimension with step 1; None for other nodes.

    `end` is clipped to the width.
    """
    if not is_call(node, aten.slice.Tensor):
        return None
    cut = bind(node)
    source, width = cut.self, shape_of(cut.self)[-1]
    if cut.dim not in (-1, len(shape_of(source)) - 1) or cut.step != 1:
        return None
    return source, int(cut.start or 0), min(int(width if cut.end is None else cut.end), int(width))
