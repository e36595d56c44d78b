"""Which weights make a value's channels, and which read them: what a pass rewrites that rotates or scales channels."""

from typing import Any

from torch import fx

from ...ops.lora.lora import lora
from .nodes import aten, bind, is_call, split_bias, through_views


class ChannelsError(Exception):
    """Why a value's channels are left alone."""


def made_by(value: Any, changed: str) -> list[tuple[fx.Node, int]]:
    """The weights whose rows are a value's channels, each with the dimension of the rows: its projection's, the bias,
    and B of its adapters. `changed`: what is to become of them, for the reasons.

    Raises ChannelsError for a value that something else than one node reads, or that is made otherwise.
    """
    if isinstance(value, fx.Node) and len(value.users) != 1:
        raise ChannelsError(f"{value.name} is read by {len(value.users)} nodes")
    base, bias = split_bias(value) if isinstance(value, fx.Node) else (value, None)
    if bias is not None:
        return [*made_by(through_views(base), changed), (loaded(bias, changed), 0)]
    if is_call(value, aten.add.Tensor):
        parts = [through_views(part) for part in (bind(value).self, bind(value).other)]
        parts.sort(key=lambda part: is_call(part, lora))
        return [found for part in parts for found in made_by(part, changed)]
    if is_call(value, lora):
        return [(loaded(bind(value).b, changed), 1)]
    if is_call(value, aten.linear.default) and bind(value).bias is None:
        return [(loaded(bind(value).weight, changed), 0)]
    raise ChannelsError(
        f"{getattr(value, 'name', value)} is neither a linear nor a LoRA branch (is lift_lora or lift_bias off?)"
    )


def read_by(value: fx.Node, changed: str) -> list[tuple[fx.Node, int]]:
    """The weights whose columns are a value's channels, each with the dimension of the columns: its projection's, and A
    of its adapters. `changed`: as `made_by` has it.

    Raises ChannelsError for any other reader.
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
                raise ChannelsError(
                    f"{user.name} reads {value.name} and is neither a linear nor a LoRA branch (is lift_lora off?)"
                )
    return found


def loaded(weight: fx.Node, changed: str) -> fx.Node:
    """The placeholder of a weight that nothing else reads. Raises ChannelsError."""
    if weight.op != "placeholder" or "recipe" not in weight.meta:
        raise ChannelsError(f"{weight.name} is computed in the graph, not loaded")
    if weight.meta["recipe"].op == "dequantize":
        raise ChannelsError(f"{weight.name} is stored in eight bits, and {changed} it would be rounded again")
    if len(weight.users) != 1:
        raise ChannelsError(f"{weight.name} is read by {len(weight.users)} nodes")
    return weight
