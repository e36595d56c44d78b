"""Front doors: a module becomes one FX graph in ATen's vocabulary, whichever way it came in.

`capture_module` (non-strict torch.export, for `sidestream.compile`) keeps a symbolic token count and parameters' names;
it works on modules on the meta device. `capture_callable` (make_fx, for what torch.compile hands to a backend) traces
concrete shapes. Neither functionalises: a mutation of the KV cache stays one node, and graph order is its meaning.
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

from .nodes import last_placeholder
from .recipe import param

ADAPTER_SUFFIXES = (".lora_a", ".lora_b")
KINDS = {
    InputKind.PARAMETER: "weight",
    InputKind.BUFFER: "weight",
    InputKind.CONSTANT_TENSOR: "weight",
    InputKind.USER_INPUT: "input",
}


class CaptureError(RuntimeError):
    """The module can't be traced into one graph."""


@dataclass
class Captured:
    """A graph whose placeholders carry `meta["kind"]` and, for weights, `meta["recipe"]`.

    `constants` holds the tensors that live in the module but in no checkpoint, under the names that the recipes use.
    `user_inputs` are the placeholders of the flattened call arguments in order; `in_spec` and `out_spec` tell how
    arguments and results are nested.
    """

    graph_module: fx.GraphModule
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    user_inputs: list[str] = field(default_factory=list)
    in_spec: Any = None
    out_spec: Any = None

    def copy(self) -> "Captured":
        """The same with a graph of its own, which passes may rewrite; its code is written when it is first called."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph_module.graph, {}))
        return replace(self, graph_module=_LazyGraphModule(self.graph_module, graph))


def capture_module(
    module: torch.nn.Module, example_inputs: dict[str, Any] | Sequence[Any], dynamic_shapes: Any = None
) -> Captured:
    """One graph of `module(**example_inputs)`, dimensions named in `dynamic_shapes` symbolic (as torch.export takes
    them).

    Raises CaptureError with torch's explanation when the module branches on data or calls what torch.export can't see
    into.
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
            raise CaptureError(
                f"{type(module).__name__} has an input of kind {spec.kind}, which Sidestream doesn't know"
            )
        if kind == "weight" and spec.target is not None:
            node.meta["recipe"] = param(spec.target)
            if spec.target.endswith(ADAPTER_SUFFIXES):
                kind = "adapter"
        node.meta["kind"] = kind
    _constants_to_inputs(graph_module, constants)
    _drop_unused_scalars(graph_module.graph)
    return Captured(graph_module, constants, user_inputs, program.call_spec.in_spec, program.call_spec.out_spec)


def capture_callable(function: Callable[..., Any], inputs: Sequence[Any], parameters: dict[int, str]) -> Captured:
    """One graph of `function(*inputs)` at the concrete shapes of `inputs`; `parameters` names the positions that hold
    weights.

    The graph keeps a placeholder for each position, so it is called with the same arguments.
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
    """Seconds of imports, that a start from kept programs does without.

    torch's tracer asks for a temporary directory while it is imported, and that question writes a file. On a full disk
    the import would fail half-way, and each later one would too: what torch has registered cannot be registered again.
    So the answer is given here where nothing can be written; the tracer itself writes no file.
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
    """Tensors that tracing baked into the graph become weight placeholders."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(graph_module, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"the graph calls into {node.target}, a part that torch captured apart (torch.cond?); only flat "
                "graphs are compiled"
            )
        name = f"constant.{node.target}"
        constants[name] = value.detach()
        with graph.inserting_after(last_placeholder(graph)):
            new = graph.placeholder(node.name + "_constant")
        new.meta.update(node.meta, kind="weight", recipe=param(name))
        if "val" not in new.meta:
            mode = next(
                other.meta["val"].fake_mode for other in graph.nodes if hasattr(other.meta.get("val"), "fake_mode")
            )
            new.meta["val"] = mode.from_tensor(value)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _drop_unused_scalars(graph: fx.Graph) -> None:
    """Inputs such as `use_cache=False`, whose value tracing has used up."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor) and not node.users:
            graph.erase_node(node)
