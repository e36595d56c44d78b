"""From an op's name in a program to its overload: Sidestream's ops, ATen's, and their `out=` variants."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from ...ops import all_ops as _all_ops  # noqa: F401  (registers every op)
from ...ops.core.registry import NAMESPACE, OPS, Op, Traits
from .buffers import ProgramError, View, views_in
from .program import Step

# arguments that an out= variant does not have: the output tensor determines them
FROM_OUT = frozenset({"dtype", "layout", "device", "pin_memory"})
FOREIGN = Traits("foreign", "foreign")
# traits of ATen's ops that may remain in a program, by the name without the overload; other ops have FOREIGN
ATEN: dict[str, Traits] = {
    "mm": Traits("product", "linear"),
    "linear": Traits("product", "linear"),
    "addmm": Traits("foreign", "linear"),
    "bmm": Traits("foreign", "linear"),
    "baddbmm": Traits("foreign", "linear"),
    "embedding": Traits("foreign", "foreign", gathers="weight"),
    "silu": Traits("foreign", "silu"),
    "rms_norm": Traits("norm", "norm"),
    "layer_norm": Traits("norm", "norm"),
    "native_layer_norm": Traits("norm", "norm"),
    "scaled_dot_product_attention": Traits("foreign", "attention"),
}


def own_op(name: str) -> Op | None:
    """Return the registered op of a name such as `sidestream.rms_norm`; None for another library's op."""
    namespace, _, rest = name.partition(".")
    if namespace != NAMESPACE:
        return None
    if rest not in OPS:
        raise ProgramError(f"the program calls {name}, which does not exist in this release; compile it again")
    return OPS[rest]


@cache
def traits_of(name: str) -> Traits:
    """Return the traits of an op for estimates and drawings, also of an op that this release does not have."""
    namespace, _, rest = name.partition(".")
    if namespace == NAMESPACE:
        return OPS[rest].traits if rest in OPS else Traits()
    return ATEN.get(rest.partition(".")[0], FOREIGN)


@cache
def overload_of(name: str) -> torch._ops.OpOverload:
    """Return the overload of `aten.add.Tensor` or `sidestream.rms_norm`. Raises ProgramError for an unknown one."""
    own = own_op(name)
    if own is not None:
        return own.overload
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        raise ProgramError(f"the program calls {name}, which this torch ({torch.__version__}) does not have") from error


@cache
def out_overload(name: str) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """Return the variant with output arguments, and their names; None for an op without such a variant."""
    overload = overload_of(name)
    wanted = [(argument.name, str(argument.type)) for argument in overload._schema.arguments]
    packet = overload.overloadpacket
    for variant in packet.overloads():
        candidate = getattr(packet, variant)
        arguments = candidate._schema.arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        others = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        missing = {name for name, _ in wanted} - {name for name, _ in others}
        if len(outs) != len(overload._schema.returns) or not missing <= FROM_OUT:
            continue
        if others == [entry for entry in wanted if entry[0] not in missing]:
            return candidate, tuple(outs)
    return None


def mutated_views(step: Step) -> Iterator[View]:
    """Yield the views among a step's arguments that its op writes in place."""
    schema = overload_of(step.op)._schema
    keywords = dict(step.kwargs)
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from views_in(step.args[index] if index < len(step.args) else keywords.get(argument.name))


def describe(value: Any) -> str:
    """Return an argument as text: views by buffer name, the rest by its repr."""
    if isinstance(value, View):
        return value.buffer
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    return repr(value)
