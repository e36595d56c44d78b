"""`torch.compile(model, backend="sidestream")`, registered by the `torch_dynamo_backends` entry point.

Dynamo guards shapes and control flow; each call runs a Program for its concrete shapes. The engine calls Programs
directly: Dynamo's guards take 0.1 to 0.5 ms per call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .api import CompiledModel, materialize_all
from .build_program import build_program
from .graph.capture import capture_callable
from .options import CompileOptions, OptionError
from .pipeline import optimize
from .run.bound_program import BoundProgram


def sidestream_backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Compile a Dynamo graph. `options` are CompileOptions by name; the default precision is the model's own.

    Raises OptionError for an unknown option.
    """
    values = dict(options or {})
    unknown = set(values) - set(CompileOptions.__dataclass_fields__)
    if unknown:
        raise OptionError(
            f"torch.compile(options=...) has unknown options {sorted(unknown)}; the options are "
            f"{', '.join(CompileOptions.__dataclass_fields__)}"
        )
    if "precision" not in values:
        dtypes = {value.dtype for value in example_inputs if isinstance(value, torch.nn.Parameter)}
        values["precision"] = "fp32" if torch.float32 in dtypes else "bf16"
    values.setdefault("finer_logits", False)  # Dynamo expects outputs in the model's own dtype
    return _ByShape(graph_module, CompileOptions(**values))


class _ByShape:
    """One compiled graph for each set of input shapes, traced on first use."""

    def __init__(self, graph_module: fx.GraphModule, options: CompileOptions) -> None:
        self.graph_module, self.options = graph_module, options
        self.placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.made: dict[tuple[Any, ...], _Entry] = {}

    def __call__(self, *inputs: Any) -> Any:
        key = tuple(
            (tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else value
            for value in inputs
        )
        if key not in self.made:
            self.made[key] = _Entry(self.graph_module, self.placeholders, self.options, inputs)
        return self.made[key](inputs)


class _Entry:
    """The program for one set of shapes, bound to the weights of the first call; bound again when a weight changes."""

    def __init__(
        self, graph_module: fx.GraphModule, names: list[str], options: CompileOptions, inputs: Sequence[Any]
    ) -> None:
        weights = [place for place, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)]
        self.parameters = {place: names[place] for place in weights}
        captured = capture_callable(fx.Interpreter(graph_module).run, inputs, self.parameters)
        self.compiled = CompiledModel(lambda _: optimize(captured, options, list(self.parameters.values())), options)
        self.positions = {
            name: place
            for place, name in enumerate(captured.user_inputs)
            if isinstance(inputs[place], torch.Tensor) and name in self.compiled.input_names
        }
        self.program = build_program(self.compiled.graph_module, self._specs(inputs), options)
        self.versions: tuple[Any, ...] = ()
        self.weights: dict[str, torch.Tensor] = {}

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        versions = tuple((inputs[place].data_ptr(), inputs[place]._version) for place in self.parameters)
        if versions != self.versions:
            self.weights, self.versions = self._weights(inputs), versions
        tensors = {name: inputs[place] for name, place in self.positions.items()}
        return BoundProgram(self.program, {**self.weights, **tensors}).run()

    def _weights(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        state = {name: inputs[place] for place, name in self.parameters.items()} | self.compiled.constants
        device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
        return materialize_all({**self.compiled.recipes, **self.compiled.adapter_recipes}, state, device)

    def _specs(self, inputs: Sequence[Any]) -> dict[str, Any]:
        specs: dict[str, Any] = {}
        for node in self.compiled.graph_module.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                is_tensor = isinstance(value, torch.Tensor)
                specs[node.name] = (tuple(map(int, value.shape)), value.dtype) if is_tensor else value
        return specs | {name: inputs[place] for name, place in self.positions.items()}
