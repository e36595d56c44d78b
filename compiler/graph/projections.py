"""A linear with its bias and LoRA branch, and the weights that produce or read a value's channels."""

from dataclasses import dataclass
from typing import Any

from torch import fx

from ...ops.lora.adjust import lora_adjust
from ...ops.lora.lora import lora
from ...ops.moe.expert_linear import expert_linear
from .nodes import DELTAS, Refused, aten, bind, is_call, shape_of, split_bias, split_delta, through_views


@dataclass
class Branch:
    """One linear, its `lora_adjust`, its bias and its LoRA node (None without one), and the node of their sum."""

    linear: fx.Node
    adjust: fx.Node | None
    bias: fx.Node | None
    lora: fx.Node | None
    joined: fx.Node

    @property
    def weight(self) -> fx.Node:
        """The linear's weight."""
        weight: fx.Node = bind(self.linear).weight
        return weight

    @property
    def width(self) -> int:
        """Output columns."""
        return int(shape_of(self.weight)[-2])


def input_of(linear: fx.Node) -> fx.Node:
    """Return the activation that a linear reads, of a layer or of its experts."""
    read: fx.Node = bind(linear).x if is_call(linear, expert_linear) else bind(linear).input
    return read


def branch_of(linear: fx.Node) -> Branch:
    """Return the linear with its adjustment, bias and LoRA branch, as far as these have no other readers."""
    joined, bias = linear, None
    readers = list(linear.users)
    adjust = readers[0] if len(readers) == 1 and is_call(readers[0], lora_adjust) else None
    if adjust is not None:
        joined = adjust
    total = _sum_of(joined)
    if total is not None and split_bias(total)[0] is joined:
        joined, bias = total, split_bias(total)[1]
    total = _sum_of(joined)
    if total is not None:
        added = bind(total)
        delta = through_views(added.other if added.self is joined else added.self)
        if is_call(delta, *DELTAS) and through_views(bind(delta).x) is through_views(input_of(linear)):
            return Branch(linear, adjust, bias, delta, total)
    return Branch(linear, adjust, bias, None, joined)


def _sum_of(node: fx.Node) -> fx.Node | None:
    """Return the addition that is the only reader of `node`; None without one."""
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], aten.add.Tensor) else None


def producing_weights(value: Any, changed: str) -> list[tuple[fx.Node, int]]:
    """Return the weights that produce a value's channels, each with the dimension of the channels.

    These are its projection's weight, its bias, and B and the shift of its adapters. Their gain is not among them: it
    commutes with factors of channels, and `rotate_values` passes its rotation to the op. `changed`: the caller's change
    to them, as a word in the reasons ("rotated"). Raises Refused for a value with another producer or more than one
    reader.
    """
    if isinstance(value, fx.Node) and len(value.users) != 1:
        raise Refused(f"{value.name} is read by {len(value.users)} nodes")
    base, bias = split_bias(value) if isinstance(value, fx.Node) else (value, None)
    if bias is not None:
        return [*producing_weights(through_views(base), changed), (loaded(bias, changed), 0)]
    if is_call(value, aten.add.Tensor):
        parts = [through_views(part) for part in (bind(value).self, bind(value).other)]
        parts.sort(key=lambda part: is_call(part, lora))
        return [found for part in parts for found in producing_weights(part, changed)]
    if is_call(value, lora):
        return [(loaded(bind(value).b, changed), 1)]
    if is_call(value, lora_adjust):
        shift = bind(value).shift
        return [*producing_weights(bind(value).y, changed), *([] if shift is None else [(loaded(shift, changed), 1)])]
    if is_call(value, aten.linear.default) and bind(value).bias is None:
        return [(loaded(bind(value).weight, changed), 0)]
    raise Refused(f"{getattr(value, 'name', value)} is not a linear or a LoRA branch (is lift_lora or lift_bias off?)")


def adjustment_of(value: Any) -> fx.Node | None:
    """Return the `lora_adjust` of a projection's result with its bias and LoRA delta; None without one."""
    value = split_bias(split_delta(value)[0])[0]
    return value if is_call(value, lora_adjust) else None


def reading_weights(value: fx.Node, changed: str) -> list[tuple[fx.Node, int]]:
    """Return the weights that read a value's channels, each with the dimension of the channels.

    These are the projections' weights and A of their adapters. `changed`: as in `producing_weights`. Raises Refused for
    any other reader.
    """
    found, waiting = [], [value]
    while waiting:
        for user in waiting.pop().users:
            if through_views(user) is not user:
                waiting.append(user)
            elif is_call(user, lora):
                found.append((loaded(bind(user).a, changed), 2))
            elif is_call(user, aten.linear.default):
                found.append((loaded(bind(user).weight, changed), 1))
            else:
                raise Refused(
                    f"{user.name} reads {value.name}, but is not a linear or a LoRA branch (is lift_lora off?)"
                )
    return found


def loaded(weight: fx.Node, changed: str) -> fx.Node:
    """Return the placeholder of a weight with one reader. Raises Refused."""
    if weight.op != "placeholder" or "recipe" not in weight.meta:
        raise Refused(f"{weight.name} is computed in the graph, not loaded")
    if weight.meta["recipe"].op == "dequantize":
        raise Refused(f"{weight.name} is stored in eight bits; {changed}, it would be rounded again")
    if len(weight.users) != 1:
        raise Refused(f"{weight.name} is read by {len(weight.users)} nodes")
    return weight
