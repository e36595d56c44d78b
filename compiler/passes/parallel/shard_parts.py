"""How `shard` gives a rank its share of a projection, of a view as heads and of a KV cache."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.branches import Branch
from ...graph.nodes import bind, fake_mode_of, insert_placeholder, set_operands, shape_of, slice_range, value_of
from ...graph.recipe import Recipe, cat, zeros
from ...graph.slices import Share, SliceError, sliced


@dataclass(frozen=True)
class Projection:
    """Output columns `start` to `end` of a packed linear, and the share of them that a rank has."""

    start: int
    end: int
    share: Share

    @property
    def width(self) -> int:
        """Columns on all ranks."""
        return self.end - self.start

    @property
    def own(self) -> int:
        """Columns on this rank."""
        return self.share.of(self.width)


def split_columns(graph: fx.Graph, branch: Branch, projections: list[Projection]) -> None:
    """The share of each projection in a packed linear's outputs: rows of its weight, bias and B.

    Raises SliceError.
    """
    _exchange(graph, branch.linear, "weight", 0, _own_rows(branch.weight, 0, projections))
    if branch.bias is not None:
        total = next(user for user in branch.bias.users if branch.linear in user.all_input_nodes)
        argument = bind(total).names_of(branch.bias)[0]
        _exchange(graph, total, argument, 0, _own_rows(branch.bias, 0, projections))
    if branch.lora is not None:
        _exchange(graph, branch.lora, "b", 1, _own_rows(bind(branch.lora).b, 1, projections))
        set_operands(branch.lora, slices=[each.own for each in projections])
    offset, moved = 0, {}
    for each in projections:
        moved[each.start, each.end] = offset, offset + each.own
        offset += each.own
    for user in list(branch.joined.users):
        cut = slice_range(user)
        if cut is not None:
            start, end = moved[cut[1:]]
            set_operands(user, start=start, end=end)


def split_rows(graph: fx.Graph, branch: Branch, share: Share) -> None:
    """The share of a linear's inputs: columns of its weight and of A. Only rank 0 adds the bias. Raises SliceError."""
    width = int(shape_of(branch.weight)[1])
    weight = sliced(branch.weight.meta["recipe"], 1, share, width), share.of(width)
    _exchange(graph, branch.linear, "weight", 1, weight)
    if branch.bias is not None and share.rank:
        value = branch.bias.meta["val"]
        branch.bias.meta["recipe"] = zeros(tuple(int(size) for size in value.shape), value.dtype)
    if branch.lora is not None:
        a = bind(branch.lora).a
        _exchange(graph, branch.lora, "a", 2, (sliced(a.meta["recipe"], 2, share, width), share.of(width)))


def split_heads(view: fx.Node, share: Share) -> None:
    """A view [T, heads, D] with a share of the heads."""
    size = list(bind(view).size)
    set_operands(view, size=[*size[:-2], share.of(int(shape_of(view)[-2])), size[-1]])


def split_cache(cache: fx.Node, share: Share) -> None:
    """A KV cache with a share of the heads; meta["heads"] keeps which, and of how many."""
    value = cache.meta["val"]
    heads = int(value.shape[1])
    cache.meta.update(val=value.new_empty((value.shape[0], share.of(heads), *value.shape[2:])), heads=(share, heads))


def propagate(graph: fx.Graph) -> None:
    """Every call's value again, from those of the graph's inputs."""
    mode = fake_mode_of(graph)
    if mode is None:
        raise ValueError("the graph holds no fake tensors; capture it first")
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function":
                target: Any = node.target
                node.meta["val"] = target(*value_of(node.args), **value_of(node.kwargs))


def _own_rows(weight: fx.Node, dim: int, projections: list[Projection]) -> tuple[Recipe, int]:
    """The recipe of a rank's share of each packed projection, and how many rows these are together."""
    recipe = weight.meta["recipe"]
    parts: tuple[Recipe, ...] = (recipe,)
    if len(projections) > 1:
        parts = recipe.args if recipe.op == "cat" and recipe.attrs["dim"] == dim else ()
    if len(parts) != len(projections):
        raise SliceError(f"{weight.name}, which is not packed from {len(projections)} weights,")
    own = [sliced(part, dim, each.share, each.width) for part, each in zip(parts, projections, strict=True)]
    return cat(dim, own), sum(each.own for each in projections)


def _exchange(graph: fx.Graph, reader: fx.Node, argument: str, dim: int, part: tuple[Recipe, int]) -> None:
    """A placeholder with `part`, a recipe and its size along `dim`, in the place of an argument; one that something
    else reads too (an embedding that is the head as well) stays.
    """
    whole: fx.Node = getattr(bind(reader), argument)
    recipe, size = part
    value = whole.meta["val"]
    shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
    if len(whole.users) == 1:
        whole.meta.update(val=value.new_empty(shape), recipe=recipe)
        return
    own = insert_placeholder(
        graph, f"{whole.name}_share", whole.meta["kind"], shape, value.dtype, after=whole, recipe=recipe
    )
    set_operands(reader, **{argument: own})
