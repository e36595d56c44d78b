"""Small FX graphs written by hand in the compiler's convention: placeholders with kind, fake value and recipe; calls of
overloads.

    build = GraphBuilder(dynamic=True)
    x = build.input("input_ids", (T,), torch.int64)
    w = build.weight("table", (32, 64))
    graph_module = build.finish(build.call(OPS["embedding"], x, w))

Dimensions named "T", "B", "B+1", "P", "NP" become symbols (or, with dynamic=False, the sizes in `sizes`).
"""

import operator
from typing import Any

import sidestream.ops.all_ops  # noqa: F401  registers the ops
import torch
from sidestream.compiler.graph.recipe import param
from sidestream.compiler.program.sizes import Spec, placeholders
from sidestream.ops.core.registry import Op
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

SIZES = {"T": 24, "B": 6, "P": 5, "NP": 11}


class GraphBuilder:
    """Appends placeholders and calls; fake values come from running the calls on fake tensors."""

    def __init__(self, dynamic: bool = True, sizes: dict[str, int] | None = None) -> None:
        self.graph = fx.Graph()
        self.sizes = {**SIZES, **(sizes or {})}
        self.dynamic = dynamic
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
        self.symbols: dict[str, Any] = {}

    def _symbol(self, name: str) -> Any:
        if name == "B+1":
            return self._symbol("B") + 1
        if not self.dynamic:
            return self.sizes[name]
        if name not in self.symbols:
            real = torch.empty(self.sizes[name], device="meta")
            context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
            self.symbols[name] = self.mode.from_tensor(real, symbolic_context=context).shape[0]
        return self.symbols[name]

    def _placeholder(self, name: str, shape: tuple[Any, ...], dtype: torch.dtype, **meta: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        sizes = tuple(self._symbol(size) if isinstance(size, str) else size for size in shape)
        with self.mode:
            node.meta.update(val=torch.empty(sizes, dtype=dtype), **meta)
        return node

    def input(self, name: str, shape: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> fx.Node:
        return self._placeholder(name, shape, dtype, kind="input")

    def weight(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, kind: str = "weight"
    ) -> fx.Node:
        return self._placeholder(name, shape, dtype, kind=kind, recipe=param(f"model.{name}"))

    def call(self, target: Any, *args: Any, side: bool = False, share: float = 0.25, **kwargs: Any) -> fx.Node:
        """One call; `side` puts it on the side lane."""
        node = self.graph.call_function(target.overload if isinstance(target, Op) else target, args, kwargs)
        with self.mode, torch.no_grad():
            values = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
            node.meta["val"] = node.target(*values[0], **values[1])
        if side:
            node.meta.update(stream="side", sm_share=share)
        return node

    def pick(self, node: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, node, index)

    def finish(self, *outputs: Any) -> fx.GraphModule:
        """The module; a single output is returned as it is, several as a tuple."""
        self.graph.output(outputs[0] if len(outputs) == 1 else outputs)
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)


def random_tensors(graph_module: fx.GraphModule, buffers: Any) -> dict[str, torch.Tensor]:
    """Random tensors for a program's inputs, weights and adapters; integers are zeros."""
    result = {}
    for buffer in buffers:
        if buffer.kind in ("input", "weight", "adapter"):
            values = torch.randn(buffer.shape) if buffer.dtype.is_floating_point else torch.zeros(buffer.shape)
            result[buffer.name] = values.to(buffer.dtype)
    return result


def static_inputs(graph_module: fx.GraphModule) -> dict[str, Spec]:
    """Placeholder name -> its own fake tensor or integer, for a graph captured at concrete sizes."""
    return {node.name: node.meta["val"] for node in placeholders(graph_module.graph)}
