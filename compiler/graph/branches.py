"""A projection with all that is added to it: its linear, its bias and its LoRA branch."""

from dataclasses import dataclass

from torch import fx

from ...ops.lora.lora import lora
from .nodes import aten, bind, is_call, shape_of, split_bias, through_views


@dataclass
class Branch:
    """One linear, its bias and its LoRA node (None without), and the node in which they are added up."""

    linear: fx.Node
    bias: fx.Node | None
    lora: fx.Node | None
    joined: fx.Node

    @property
    def weight(self) -> fx.Node:
        """What the linear multiplies with."""
        weight: fx.Node = bind(self.linear).weight
        return weight

    @property
    def width(self) -> int:
        """Output columns."""
        return int(shape_of(self.weight)[0])


def branch_of(linear: fx.Node) -> Branch:
    """The linear with the bias and the LoRA branch that alone read it."""
    joined, bias = linear, None
    total = _sum_of(joined)
    if total is not None and split_bias(total)[0] is linear:
        joined, bias = total, split_bias(total)[1]
    total = _sum_of(joined)
    if total is not None:
        added = bind(total)
        delta = through_views(added.other if added.self is joined else added.self)
        if is_call(delta, lora) and through_views(bind(delta).x) is through_views(bind(linear).input):
            return Branch(linear, bias, delta, total)
    return Branch(linear, bias, None, joined)


def _sum_of(node: fx.Node) -> fx.Node | None:
    """The addition that alone reads `node`."""
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], aten.add.Tensor) else None
