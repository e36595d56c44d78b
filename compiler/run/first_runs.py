"""Which launches this process has not made yet: what has to run once before it may be captured.

The first launch of a kernel compiles it, loads its machine code and may allocate scratch memory; none of that belongs
into a capture. All of it follows from the op, its plain arguments, and the shapes, strides, dtypes and alignments of
its tensors, so one layer's launch stands for all layers', and a program's for those of every program that has the same.
"""

from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from ..program.buffers import View
from ..program.calls import mutated_views, overload_of
from ..program.program import Program, Step

ALIGNMENT = 16  # bytes: what kernels are specialised for, and what tensor descriptors ask of an address
_made: set[Hashable] = set()


def first_runs(program: Program, buffers: Mapping[str, torch.Tensor], place: Hashable) -> list[int]:
    """Indices of the steps that are to run, in order, before `program` is captured; they count as made from now on.

    `buffers`: the tensors by buffer name. `place`: the device and stream; libraries keep scratch memory for each. Steps
    that write whole numbers of 32 or 64 bits always run: others may take their results for addresses.
    """
    aligned = {name: tensor.data_ptr() % ALIGNMENT for name, tensor in buffers.items()}
    dtypes = {buffer.name: buffer.dtype for buffer in program.buffers}

    def described(values: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple(map(describe, values))

    def describe(value: Any) -> Hashable:
        if isinstance(value, View):
            dtype = value.dtype or dtypes[value.buffer]
            return value.shape, value.stride, dtype, (aligned[value.buffer] + value.offset * dtype.itemsize) % ALIGNMENT
        # 1, 1.0 and True are equal, and compile differently
        return described(value) if isinstance(value, tuple) else (type(value), value)

    chosen = []
    for step in program.steps:
        key = (
            place,
            step.op,
            step.sm_budget,
            step.pdl,
            described(step.args),
            described(step.kwargs),
            described(step.outs),
        )
        if key not in _made or _writes_numbers(step, dtypes):
            _made.add(key)
            chosen.append(step.index)
    return chosen


def _writes_numbers(step: Step, dtypes: Mapping[str, torch.dtype]) -> bool:
    written = (*step.outs, *mutated_views(step)) if _mutates(step.op) else step.outs
    return any((view.dtype or dtypes[view.buffer]) in (torch.int32, torch.int64) for view in written)


@cache
def _mutates(op: str) -> bool:
    return overload_of(op)._schema.is_mutable
