"""Decoder layer of a graph's node or a program's step; HEAD before the first layer, TAIL after the last."""

from collections.abc import Iterable

from torch import fx

from ..graph.layer_names import layer_of_name
from ..graph.recipe import Recipe
from .program import Program

HEAD = -1
TAIL = 1_000_000


def graph_layers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return each node's layer: from its module's path or checkpoint tensors, else that of its latest operand."""
    layers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        own = _own_layer(node)
        reached = max((layers[source] for source in node.all_input_nodes if source.op != "placeholder"), default=HEAD)
        outside = node.op == "output" or (own is None and "nn_module_stack" in node.meta)
        layers[node] = own if own is not None else TAIL if outside and reached > HEAD else reached
    for node in graph.nodes:
        if node.op == "placeholder" and layers[node] == HEAD and {layers[user] for user in node.users} == {TAIL}:
            layers[node] = TAIL
    return layers


def step_layers(program: Program) -> list[int]:
    """Return each step's layer: from its weights, adapters and caches, else that of its latest operand."""
    named = {
        buffer.name: _layer_of_sources(buffer.name, program.recipes.get(buffer.name))
        for buffer in program.of_kind("input", "weight", "adapter")
    }
    weights = {buffer.name for buffer in program.of_kind("weight")}
    made: dict[str, int] = {}
    layers = []
    for step in program.steps:
        reads = [view.buffer for view in step.inputs()]
        own = [layer for name in reads if (layer := named.get(name)) is not None]
        reached = max((made[name] for name in reads if name in made), default=HEAD)
        beyond = not own and reached > HEAD and any(name in weights for name in reads)
        layer = TAIL if beyond else max([reached, *own]) if own else reached
        layers.append(layer)
        made.update((view.buffer, layer) for view in step.outs)
    return layers


def layer_name(layer: int) -> str:
    """Return `before the layers`, `layer 3` or `after the layers`."""
    return {HEAD: "before the layers", TAIL: "after the layers"}.get(layer, f"layer {layer}")


def spans(layers: Iterable[int]) -> str:
    """Return layer numbers in short form: `0-3, 7`."""
    parts: list[tuple[int, int]] = []
    for layer in sorted(set(layers)):
        if parts and parts[-1][1] == layer - 1:
            parts[-1] = (parts[-1][0], layer)
        else:
            parts.append((layer, layer))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _own_layer(node: fx.Node) -> int | None:
    if node.op == "placeholder":
        return _layer_of_sources(node.name, node.meta.get("recipe"))
    layers = [layer_of_name(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return next((layer for layer in reversed(layers) if layer is not None), None)


def _layer_of_sources(name: str, recipe: Recipe | None) -> int | None:
    if recipe is None:
        return layer_of_name(name)
    found = {layer_of_name(source) for source in recipe.sources()}
    return found.pop() if len(found) == 1 else None
