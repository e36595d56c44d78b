"""Kernels compiled and loaded ahead of their first launch, on several threads, while more programs are made.

Each step is called as for a launch; in place of launching, Triton hands what it would compile to the threads. A
compiler spends most of its time outside of Python, or in a process of its own. What can't be compiled is left alone
here: the launch itself tells.
"""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from ..program.calls import own_op
from .emit import BoundProgram
from .first_runs import first_runs

MOST_THREADS = 16
log = logging.getLogger(__name__)


class KernelsAhead:
    """`with KernelsAhead(device) as ahead: ahead.add(bound)` for each program; all is compiled and loaded when the
    block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = _Threads(device)
        self._mode = triton.AsyncCompileMode(self._threads, ignore_errors=True)

    def __enter__(self) -> "KernelsAhead":
        self._mode.__enter__()
        return self

    def add(self, bound: BoundProgram) -> None:
        """Begin to compile what this program launches and no program before it."""
        steps = bound.program.steps
        with torch.cuda.device(self._device), _no_launches():
            for index in first_runs(bound.program, bound.buffers, ("compiled", self._device)):
                if own_op(steps[index].op) is None:
                    continue
                try:
                    bound.run_step(index)
                except Exception as error:  # whatever a compiler may raise: the launch itself will raise it again
                    log.debug("%s is not compiled ahead: %s", steps[index].name, error)

        self._take_ready()

    def call(self, function: Callable[[], object]) -> None:
        """Begin to compile what `function` launches; it runs, but for its kernels."""
        with torch.cuda.device(self._device), _no_launches():
            function()

        self._take_ready()

    def _take_ready(self) -> None:
        for future in self._mode.raw_futures:  # what is ready is found at once by the next program
            if future.done():
                self._mode.future_kernels[future._key].result(ignore_errors=True)

    def __exit__(self, *error: Any) -> None:
        try:
            self._mode.__exit__(*error)
        finally:
            self._threads.shutdown()


class _Threads(Executor):
    """Compiles, then loads the machine code."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "kernels")

    def submit(self, compile_kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return self._pool.submit(self._ready, compile_kernel)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _ready(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        with torch.cuda.device(self._device):
            _ = kernel.run  # asking for the launcher builds it and loads the machine code
        return kernel


@contextmanager
def _no_launches() -> Iterator[None]:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **{**kwargs, "warmup": True})

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run
