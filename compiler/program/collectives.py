"""What ranks that share a model must agree on: the same collectives, in the same order, of the same sizes."""

import hashlib

import torch

from ...ops.collectives.tensor_parallel_group import GroupError, RankGroup
from .buffers import ProgramError, View
from .calls import traits_of
from .program import Program


def collective_order(program: Program) -> list[str]:
    """A line for each collective, in order. Raises ProgramError for one that is not on the main lane: only there the
    order of steps is the order in which they run.
    """
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
    """Waits for all ranks, which must be about to use a program of the same bucket. Raises GroupError where theirs has
    other collectives: at the first one that differs they would wait for each other for ever.
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
    return f"{view.shape}{view.dtype or program.by_name[view.buffer].dtype}"
