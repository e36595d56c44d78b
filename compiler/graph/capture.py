"""Capture a module as one FX graph of ATen ops.

`capture_module` (non-strict torch.export, for `sidestream.compile`) keeps a symbolic token count and parameters' names,
and accepts modules on the meta device. `capture_callable` (make_fx, for torch.compile) traces concrete shapes. Neither
functionalises: a mutation of the KV cache stays one node, ordered by the graph.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from .nodes import fake_mode_of, last_placeholder
from .recipe import param

ADAPTER_SUFFIXES = (".lora_a", ".lora_b", ".lora_gain", ".lora_shift")
KINDS = {
    InputKind.PARAMETER: "weight",
    InputKind.BUFFER: "weight",
    InputKind.CONSTANT_TENSOR: "weight",
    InputKind.USER_INPUT: "input",
}


class CaptureError(RuntimeError):
    """A module can't be traced into one graph."""


@dataclass
class Captured:
    """A graph; placeholders have `meta["kind"]` and, for weights, `meta["recipe"]`.

    constants    tensors of the module that are not in checkpoints, by their names in recipes
    user_inputs  placeholders of the flattened call arguments, in order
    in_spec, out_spec  nesting of arguments and results
    """

    graph_module: fx.GraphModule
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    user_inputs: list[str] = field(default_factory=list)
    in_spec: Any = None
    out_spec: Any = None

    def copy(self) -> "Captured":
        """Return a copy with its own graph, which passes may rewrite; its code is generated on the first call."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph_module.graph, {}))
        return replace(self, graph_module=_LazyGraphModule(self.graph_module, graph))


def capture_module(
    module: torch.nn.Module, example_inputs: dict[str, Any] | Sequence[Any], dynamic_shapes: Any = None
) -> Captured:
    """Return the graph of `module(**example_inputs)`; dimensions in `dynamic_shapes` are symbolic.

    `dynamic_shapes` is in the format of torch.export. Raises CaptureError with torch's explanation when the module
    branches on data or calls code that can't be traced.
    """
    _import_tracer()
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    args, kwargs = ((), example_inputs) if isinstance(example_inputs, dict) else (tuple(example_inputs), {})
    try:
        with torch.no_grad():
            program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except (TorchDynamoException, GuardOnDataDependentSymNode, RuntimeError, ValueError, TypeError) as error:
        raise CaptureError(f"torch.export could not capture {type(module).__name__}: {error}") from error
    graph_module = program.graph_module
    constants = {
        name: value
        for name, value in {**dict(module.named_buffers()), **program.constants}.items()
        if isinstance(value, torch.Tensor)
    }
    placeholders = {node.name: node for node in graph_module.graph.nodes if node.op == "placeholder"}
    user_inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        kind = KINDS.get(spec.kind)
        if kind is None:
            raise CaptureError(f"{type(module).__name__} has an input of kind {spec.kind}, which is not supported")
        if kind == "weight" and spec.target is not None:
            node.meta["recipe"] = param(spec.target)
            if spec.target.endswith(ADAPTER_SUFFIXES):
                kind = "adapter"
        node.meta["kind"] = kind
    _constants_to_inputs(graph_module, constants)
    _drop_unused_scalars(graph_module.graph)
    return Captured(graph_module, constants, user_inputs, program.call_spec.in_spec, program.call_spec.out_spec)


def capture_callable(function: Callable[..., Any], inputs: Sequence[Any], parameters: dict[int, str]) -> Captured:
    """Return the graph of `function(*inputs)` at the concrete shapes of `inputs`, with a placeholder for each position.

    `parameters`: position -> name of a weight.
    """
    with torch.no_grad():
        graph_module = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs)
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        node.meta["kind"] = "weight" if position in parameters else "input"
        node.meta.setdefault("val", inputs[position])
        if position in parameters:
            node.meta["recipe"] = param(parameters[position])
    constants: dict[str, torch.Tensor] = {}
    _constants_to_inputs(graph_module, constants)
    return Captured(graph_module, constants, [node.name for node in placeholders])


def _import_tracer() -> None:
    """Import torch's tracer. This takes seconds, and a start from cached programs does not need it.

    The import calls tempfile.gettempdir(), which writes a file. On a full disk the import would fail half-way, and then
    always, since torch cannot register its ops twice. So a directory is set here; the tracer itself writes no file.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")
        try:
            import_module("torch.export._trace")
        finally:
            tempfile.tempdir = None


def _constants_to_inputs(graph_module: fx.GraphModule, constants: dict[str, torch.Tensor]) -> None:
    """Replace tensors that tracing has stored in the graph by weight placeholders."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(graph_module, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"the graph calls {node.target}, a subgraph that torch captured separately (torch.cond?); only flat "
                "graphs are supported"
            )
        name = f"constant.{node.target}"
        constants[name] = value.detach()
        with graph.inserting_after(last_placeholder(graph)):
            new = graph.placeholder(node.name + "_constant")
        new.meta.update(node.meta, kind="weight", recipe=param(name))
        if "val" not in new.meta:
            mode = fake_mode_of(graph)
            assert mode is not None
            new.meta["val"] = mode.from_tensor(value)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _drop_unused_scalars(graph: fx.Graph) -> None:
    """Remove inputs such as `use_cache=False`, which tracing has evaluated."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor) and not node.users:
            graph.erase_node(node)
