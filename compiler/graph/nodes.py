"""Small facts and moves about FX nodes that every pass needs: what is a view, how a node is replaced, how a new one
gets its shape.
"""

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ops.core.registry import NAMESPACE, Op
from ...ops.lora.lora import lora

aten = torch.ops.aten

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


def is_check(node: fx.Node) -> bool:
    """Whether a node only asserts what tracing has seen, and computes nothing."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.split("::")[1] in CHECKS


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments; FX's own type for them is too wide to work with."""
    return node.args


def is_call(node: Any, *targets: Any) -> bool:
    """Whether `node` is a call of one of `targets` (overloads or registered ops)."""
    wanted = [target.overload if isinstance(target, Op) else target for target in targets]
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in wanted


def is_kernel(node: fx.Node) -> bool:
    """Whether a node costs a kernel launch: a call that is neither a view nor a pick of a result, a check or a size."""
    if node.op != "call_function" or node.target in VIEWS or node.target is operator.getitem or is_check(node):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or "sym_" not in node.target.name()


def op_name(node: fx.Node) -> str:
    """`sidestream.rms_norm` or `aten.add.Tensor`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name.removesuffix(".default") if name.startswith(NAMESPACE) else name
    return getattr(target, "__name__", str(target))


def value_of(argument: Any) -> Any:
    """The fake value behind a node (or the nodes of a list); anything else unchanged."""
    return fx.map_arg(argument, lambda node: node.meta["val"])


def shape_of(node: fx.Node) -> torch.Size:
    """The (possibly symbolic) shape of a node's tensor."""
    return node.meta["val"].shape


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode that the graph's fake tensors live in."""
    for node in graph.nodes:
        value = node.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def _value_mode(graph: fx.Graph) -> AbstractContextManager[Any]:
    """Where new values are computed: among the graph's fake tensors, or on meta tensors in a specialized graph."""
    mode = fake_mode_of(graph)
    if mode is None and not any(
        isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_meta for node in graph.nodes
    ):
        raise ValueError("the graph holds no fake tensors; capture it first")
    return mode or nullcontext()


def insert_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node | None = None) -> fx.Node:
    """Append a call at the graph's insertion point, its value computed on fake tensors; `like` gives source
    information.
    """
    if isinstance(target, Op):
        target = target.overload
    node = graph.create_node("call_function", target, args, name=getattr(target, "_opname", None))
    with _value_mode(graph), torch.no_grad():
        node.meta["val"] = target(*value_of(args))
    if like is not None:
        for key in ("stack_trace", "nn_module_stack"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
    return node


def insert_placeholder(
    graph: fx.Graph, name: str, kind: str, shape: tuple[Any, ...], dtype: torch.dtype, after: fx.Node, **meta: Any
) -> fx.Node:
    """A new graph input of `kind` ("input", "weight" or "adapter") behind the placeholder `after`, with a fake value
    of this shape.
    """
    mode = fake_mode_of(graph)
    if mode is None:
        raise ValueError("the graph holds no fake tensors; capture it first")
    with graph.inserting_after(after), mode:
        node = graph.placeholder(name)
        node.meta.update(val=torch.empty(shape, dtype=dtype, device=after.meta["val"].device), kind=kind, **meta)
    return node


def last_placeholder(graph: fx.Graph) -> fx.Node:
    """The last of the graph's inputs."""
    return [node for node in graph.nodes if node.op == "placeholder"][-1]


def through_views(node: Any) -> Any:
    """The node behind any number of pure reshapes."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target in RESHAPES:
        node = args_of(node)[0]
    return node


def split_delta(value: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """`linear + lora` as (linear, lora); any other node as (node, None).

    Consumers take the pair, so that a base GEMM never waits for the side stream.
    """
    if is_call(value, aten.add.Tensor):
        for base, delta in (args_of(value), args_of(value)[::-1]):
            if is_call(through_views(delta), lora):
                return base, delta
    return value, None


def slice_arguments(node: fx.Node) -> tuple[fx.Node, int, Any, Any, int]:
    """(source, dim, start, end, step) of an aten.slice, defaults filled in."""
    given = list(args_of(node))
    source, dim, start, end, step = given + [None, 0, None, None, 1][len(given) :]
    return source, dim, start, end, step


def slice_range(node: Any) -> tuple[fx.Node, int, int] | None:
    """(source, start, end) when `node` is a slice of the last dimension with step 1, else None; the end is clipped
    to the width.
    """
    if not is_call(node, aten.slice.Tensor):
        return None
    source, dim, start, end, step = slice_arguments(node)
    width = shape_of(source)[-1]
    if dim not in (-1, len(shape_of(source)) - 1) or step != 1:
        return None
    return source, int(start or 0), min(int(width if end is None else end), int(width))
