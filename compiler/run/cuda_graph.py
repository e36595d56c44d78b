"""CUDA graph capture, and the launches that must run once before it."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

import torch

from ..program.buffers import View
from ..program.calls import mutated_views, overload_of
from ..program.program import Program, Step


def capture(device: torch.device, prepare: Callable[[], object], run: Callable[[], object], pool: Any = None) -> Any:
    """Return the CUDA graph of `run`; `pool`: memory pool to share with other captures.

    `prepare` runs first on the same stream, to compile and load kernels. During the capture other threads may wait for
    events and launch on other streams, but must not use this stream.
    """
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.stream(stream):
        prepare()
        torch.cuda.synchronize(device)
        # not torch.cuda.graph, which collects garbage and empties the allocator's cache before each capture
        # thread_local: in the default mode another thread's wait for a step's event fails and ends the capture
        graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    return graph


@lru_cache(maxsize=16)
def capture_stream(device: torch.device) -> Any:
    """Return the stream of all captures, so that libraries allocate per-stream memory once."""
    return torch.cuda.Stream(device)


ALIGNMENT = 16  # bytes: kernels are specialised for this alignment, and tensor descriptors need it
_made: set[Hashable] = set()


def first_runs(program: Program, buffers: Mapping[str, torch.Tensor], place: Hashable) -> list[int]:
    """Return indices of the steps to run before `program` is captured; they count as run from now on.

    A kernel's first launch compiles it, loads it and may allocate scratch memory, which must not happen in a capture.
    All of that depends on the op, its plain arguments, and its tensors' shapes, strides, dtypes and alignment, so one
    of several equal launches is enough. `buffers`: tensors by buffer name. `place`: device and stream; libraries have
    scratch memory for each. Steps that write 32- or 64-bit integers always run: other steps may use these as addresses.
    """
    aligned = {name: tensor.data_ptr() % ALIGNMENT for name, tensor in buffers.items()}
    dtypes = {buffer.name: buffer.dtype for buffer in program.buffers}

    def described(values: Iterable[Any]) -> tuple[Hashable, ...]:
        return tuple(map(describe, values))

    def describe(value: Any) -> Hashable:
        if isinstance(value, View):
            dtype = value.dtype or dtypes[value.buffer]
            return value.shape, value.stride, dtype, (aligned[value.buffer] + value.offset * dtype.itemsize) % ALIGNMENT
        # 1, 1.0 and True are equal in Python, but compile differently
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


def forget_first_runs() -> None:
    """Let `first_runs` choose all steps again, as in a new process."""
    _made.clear()


def _writes_numbers(step: Step, dtypes: Mapping[str, torch.dtype]) -> bool:
    written = (*step.outs, *mutated_views(step)) if _mutates(step.op) else step.outs
    return any((view.dtype or dtypes[view.buffer]) in (torch.int32, torch.int64) for view in written)


@cache
def _mutates(op: str) -> bool:
    return overload_of(op)._schema.is_mutable
