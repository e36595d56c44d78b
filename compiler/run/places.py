"""Parts of sums over the ranks, written by their producers where the peers read them.

The planned arena keeps room for these temporaries; only the tensor that they are bound to changes.
"""

from collections.abc import Iterator

import torch

from ...ops.collectives.exchange import PLACES, Exchange, exchange_of
from ...ops.collectives.tensor_parallel_group import GroupError
from ..cost.work import named_arguments
from ..program.buffers import View
from ..program.calls import mutated_views, traits_of
from ..program.program import Program, Step


def places_of(program: Program) -> dict[str, int]:
    """temp buffer -> the place of an Exchange that it may lie in, so that its collective need not bring it there.

    A peer may read a place until the next collective has ended. So consecutive collectives have different places, over
    the end of a run too: each program's first is 0, and its last is not. Left out are parts to which a delta is added,
    and those that are touched before the collective before theirs has ended, or on another lane, or later.
    """
    sums = [step for step in program.steps if _part(step) is not None]
    places: dict[str, int] = {}
    if len(sums) < 2 or any(step.stream != "main" for step in sums):
        return places
    for ordinal, step in enumerate(sums):
        part, place = _part(step), ordinal % 2
        if ordinal == len(sums) - 1 and place == 0:
            place = PLACES - 1
        before = sums[ordinal - 1].index if ordinal else -1
        if part is not None and _may_lie_apart(program, step, part, before):
            places[part.buffer] = place
    return places


def placed_tensors(program: Program, device: torch.device) -> dict[str, torch.Tensor]:
    """The buffers of `places_of` that this rank's exchange has room for, in its memory; none where ranks share none."""
    exchange = _exchange(program, device)
    if exchange is None:
        return {}
    places, tensors = exchange.places(), {}
    for name, place in places_of(program).items():
        buffer = program.by_name[name]
        if buffer.nbytes <= exchange.slot_bytes:
            tensors[name] = places[place][: buffer.nbytes].view(buffer.dtype).view(buffer.shape)
    return tensors


def _exchange(program: Program, device: torch.device) -> Exchange | None:
    names = {dict(named_arguments(step))["group"] for step in program.steps if _part(step) is not None}
    try:
        return exchange_of(names.pop(), device) if len(names) == 1 else None
    except GroupError:  # a rank's program outside of its process, to be looked at
        return None


def _part(step: Step) -> View | None:
    """What a rank brings to a sum over the ranks; None for other steps."""
    if traits_of(step.op).family != "collective":
        return None
    part = dict(named_arguments(step)).get("partial")
    return part if isinstance(part, View) else None


def _may_lie_apart(program: Program, step: Step, part: View, before: int) -> bool:
    buffer = program.by_name[part.buffer]
    whole = (part.shape, part.stride, part.offset, part.dtype) == (buffer.shape, buffer.strides, 0, None)
    if buffer.kind != "temp" or not whole or not buffer.nbytes or buffer.stride is not None:
        return False
    if dict(named_arguments(step)).get("delta") is not None:
        return False
    return all(
        other.stream == "main" and before < other.index <= step.index for other in _touching(program, buffer.name)
    )


def _touching(program: Program, name: str) -> Iterator[Step]:
    for step in program.steps:
        if any(view.buffer == name for view in (*step.inputs(), *step.outs, *mutated_views(step))):
            yield step
