"""Queue of kernels that forked processes compile into Triton's cache, each kernel once on a host.

A process binds each program that it has built to meta tensors and adds the program's kernels; then all processes
compile what is in the queue. Shapes, strides, offsets and constants of these launches are those of the GPU's, so the
keys in Triton's cache are the same. The number of KV pages is not, but no key depends on it. What a process fails to
compile is compiled by the GPU process, which reports the error.
"""

import logging
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ....compiler.cost.machine_code import launches_become
from ....compiler.program.calls import own_op
from ....compiler.program.program import Bucket, Program
from ....compiler.run.bound_program import BoundProgram
from ....compiler.run.compile_once import CompileOnce, lock_byte
from ....compiler.run.cuda_graph import first_runs
from ....ops.core.device import H200_SMS, multiprocessors
from ....ops.linear.kernel_selection import table_path

META = torch.device("meta")
_TASK = struct.Struct("<HHI")  # indices of a program, of its step, and of the step's launch; divides a pipe's buffers
_log = logging.getLogger(__name__)


class KernelQueue:
    """Kernels of the programs of `buckets`. Create it before the processes are forked, and close it afterwards.

    load    returns the program of a bucket that another process has built, or None
    target  GPU to compile for
    """

    def __init__(self, buckets: Sequence[Bucket], load: Callable[[Bucket], Program | None], target: GPUTarget) -> None:
        self.buckets = [replace(bucket, pages=1) for bucket in buckets]  # as the cache stores programs
        self._load, self._target = load, target
        self._bound: dict[int, BoundProgram] = {}
        self._claimed: set[str] = set()
        # a locked byte is a process's claim to a kernel, and ends with the process
        self._claims = os.memfd_create("kernels", os.MFD_CLOEXEC)
        self._tasks, self._added = os.pipe()
        os.set_blocking(self._added, False)

    def close(self) -> None:
        """Close this process's ends of the queue."""
        for descriptor in (self._claims, self._tasks, self._added):
            os.close(descriptor)

    def add(self, bucket: Bucket, program: Program) -> None:
        """Add the kernels of a program that no process has added."""
        index = self.buckets.index(bucket)
        bound = self._bound[index] = _bind(program)
        for step in first_runs(program, bound.buffers, "queue"):
            if own_op(program.steps[step].op) is not None:
                self._run(bound, step, partial(self._add_launch, index, step))

    def close_input(self) -> None:
        """Add no more kernels."""
        os.close(self._added)

    def compile_all(self, report: Callable[[], object]) -> None:
        """Compile kernels until all processes have closed the input and none is left; call `report` after each."""
        with CompileOnce(_Here(), ignore_errors=True):
            while task := os.read(self._tasks, _TASK.size):
                index, step, launch = _TASK.unpack(task)
                bound = self._bind_built(index)
                if bound is not None:
                    self._run(bound, step, partial(_compile_launch, launch))
                report()

    def _run(self, bound: BoundProgram, step: int, instead: Callable[[int, Callable[[], Any]], object]) -> None:
        """Run a step with `instead(place, compile_kernel)` in place of each launch."""
        places, run = count(), JITFunction.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return instead(next(places), partial(run, kernel, *args, **{**kwargs, "warmup": True}))

        try:
            # cuBLAS has its own kernels, and does not support meta tensors
            with launches_become(launch, self._target), patch.object(torch, "_scaled_mm", lambda *_, out, **__: out):
                bound.run_step(step)
        except Exception as error:  # a compiler may raise anything; the GPU process will raise it again
            _log.debug("%s is not compiled ahead: %s", bound.program.steps[step].name, error)

    def _add_launch(self, index: int, step: int, place: int, compile_kernel: Callable[[], Any]) -> None:
        def add(**launch: Any) -> bool:
            if self._claim(f"{launch['fn'].module}.{launch['fn'].name} {launch['key']}"):
                os.write(self._added, _TASK.pack(index, step, place))
            return True  # compile nothing now

        with patch.object(knobs.runtime, "jit_cache_hook", add):
            compile_kernel()

    def _claim(self, kernel: str) -> bool:
        """Return whether this process is the first that asks for a kernel."""
        known = kernel in self._claimed
        self._claimed.add(kernel)
        return not known and lock_byte(self._claims, kernel)

    def _bind_built(self, index: int) -> BoundProgram | None:
        if index not in self._bound:
            program = self._load(self.buckets[index])
            if program is None:
                return None
            self._bound[index] = _bind(program)
        return self._bound[index]


class _Here(Executor):
    """Executor that runs a function at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future = Future[Any]()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # a compiler may raise anything; the GPU process will raise it again
            future.set_exception(error)
        return future


def queue_target(device: torch.device) -> GPUTarget | None:
    """Return the target of a GPU's kernels; None if launches with meta tensors, which assume an H200's number of SMs
    and tables, may choose other kernels.
    """
    same_tables = table_path(torch.cuda.get_device_name(device)) == table_path(None)
    if multiprocessors(device) != H200_SMS or not same_tables:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return GPUTarget("cuda", 10 * major + minor, 32)


def _compile_launch(wanted: int, place: int, compile_kernel: Callable[[], Any]) -> Any:
    return compile_kernel() if place == wanted else None


def _bind(program: Program) -> BoundProgram:
    tensors = {
        buffer.name: torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=META)
        for buffer in program.buffers
        if buffer.kind != "temp"
    }
    return BoundProgram(program, tensors, META)
