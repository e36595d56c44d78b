"""Collectives of a program: the same order on all ranks, and partial sums written directly to memory that peers read.

The memory plan is unchanged and still has space for these temporaries, but they are bound to other tensors.
"""

import hashlib
from collections.abc import Iterator

import torch

from ...ops.collectives.exchange import PLACES, Exchange, exchange_of
from ...ops.collectives.tensor_parallel_group import GroupError, RankGroup
from ..cost.bytes_and_flops import named_arguments
from ..program.buffers import ProgramError, View
from ..program.calls import mutated_views, traits_of
from ..program.program import Program, Step


def places_of(program: Program) -> dict[str, int]:
    """Return temp buffer -> index of the Exchange's slot in which it may be stored, so that no copy is needed.

    A peer may read a slot until the next collective has ended. So consecutive collectives have different slots, also
    across runs: each program's first collective has slot 0, and its last one has another. Parts with a delta are
    excluded, and parts that are accessed before the previous collective has ended, on the side lane, or after their own
    collective.
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
        if part is not None and _is_placeable(program, step, part, before):
            places[part.buffer] = place
    return places


def placed_tensors(program: Program, device: torch.device) -> dict[str, torch.Tensor]:
    """Return buffer -> tensor in this rank's exchange memory, for the buffers of `places_of` that fit a slot."""
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
    except GroupError:  # the program of another process, which is only inspected here
        return None


def _part(step: Step) -> View | None:
    """Return this rank's operand of a sum over the ranks; None for other steps."""
    if traits_of(step.op).family != "collective":
        return None
    part = dict(named_arguments(step)).get("partial")
    return part if isinstance(part, View) else None


def _is_placeable(program: Program, step: Step, part: View, before: int) -> bool:
    """Return whether `part` fulfils the conditions of `places_of`; `before`: index of the previous collective."""
    buffer = program.by_name[part.buffer]
    whole = (part.shape, part.stride, part.offset, part.dtype) == (buffer.shape, buffer.strides, 0, None)
    if buffer.kind != "temp" or not whole or not buffer.nbytes or buffer.stride is not None:
        return False
    if dict(named_arguments(step)).get("delta") is not None:
        return False
    accessing = _accessing(program, buffer.name)
    return all(other.stream == "main" and before < other.index <= step.index for other in accessing)


def _accessing(program: Program, name: str) -> Iterator[Step]:
    """Yield the steps that access a buffer."""
    for step in program.steps:
        if any(view.buffer == name for view in (*step.inputs(), *step.outs, *mutated_views(step))):
            yield step


def collective_order(program: Program) -> list[str]:
    """Return one line of text per collective, in order. Raises ProgramError for a collective on the side lane."""
    lines = []
    for step in program.steps:
        if traits_of(step.op).family != "collective":
            continue
        if step.stream != "main":
            raise ProgramError(f"step {step.index} of {program.name} is a collective on the side lane: {step.op}")
        sizes = [_form(program, view) for view in (*step.inputs(), *step.outs)]
        lines.append(f"{step.op} {[arg for arg in step.args if isinstance(arg, str)]} {' '.join(sizes)}")
    return lines


def check_same_order(program: Program, group: RankGroup) -> None:
    """Compare the ranks' programs of a bucket. Raises GroupError if collectives differ, which would deadlock.

    All ranks must call it; it waits for them.
    """
    text = "\n".join([program.name, *collective_order(program)])
    own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    others = [int(each) for each in group.gather(torch.tensor([own]))]
    if len(set(others)) > 1:
        ranks = [rank for rank, other in enumerate(others) if other != others[0]]
        raise GroupError(
            f"{program.name} has other collectives on rank {', '.join(map(str, ranks))} than on rank 0; start all "
            "ranks with the same release and options"
        )


def _form(program: Program, view: View) -> str:
    """Return a view's shape and dtype as text."""
    return f"{view.shape}{view.dtype or program.by_name[view.buffer].dtype}"
