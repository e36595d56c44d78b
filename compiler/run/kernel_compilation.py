"""Compilation of kernels on several threads before their first launch; detection of compilations within a step.

KernelsAhead calls each step; instead of launching a kernel, Triton submits it to the threads, since compilers run
mostly without the GIL. Failures are ignored there: the launch raises them again. Compilations counts the kernels that
are nevertheless compiled in a step, which delays clients by seconds.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia import driver
from triton.compiler.compiler import make_backend
from triton.runtime import build
from triton.runtime import driver as active_driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from ..program.calls import own_op
from .bound_program import BoundProgram
from .compile_once import CompileOnce
from .cuda_graph import first_runs

MOST_THREADS = 16
log = logging.getLogger(__name__)


@lru_cache
def preparing(device: torch.device) -> threading.Thread:
    """Return a thread, started by the first call, that does for a GPU what takes a process seconds before its first
    launch: create the context, load Triton's driver, and hash Triton's files.
    """

    def prepare() -> None:
        torch.cuda.mem_get_info(device)
        with torch.cuda.device(device):
            make_backend(active_driver.active.get_current_target()).hash()
            triton_key()

    thread = threading.Thread(target=prepare, name="cuda-context", daemon=True)
    thread.start()
    return thread


class KernelsAhead:
    """Context that compiles the kernels of programs on threads; they are loaded by the end of the context.

    with KernelsAhead(device) as ahead:
        ahead.add(bound)  # for each program
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), "kernels")
        self._mode = _CompileAndLoad(device, self._threads)

    def __enter__(self) -> "KernelsAhead":
        self._mode.__enter__()
        return self

    def add(self, bound: BoundProgram) -> None:
        """Start to compile the kernels of this program that no earlier program contains."""
        steps = bound.program.steps
        with torch.cuda.device(self._device), _no_launches():
            for index in first_runs(bound.program, bound.buffers, ("compiled", self._device)):
                if own_op(steps[index].op) is None:
                    continue
                try:
                    bound.run_step(index)
                except Exception as error:  # a compiler may raise anything; the launch will raise it again
                    log.debug("%s is not compiled ahead: %s", steps[index].name, error)

        self._finish_ready()

    def call(self, function: Callable[[], object]) -> None:
        """Run `function` without launching its kernels, and start to compile them."""
        with torch.cuda.device(self._device), _no_launches():
            function()

        self._finish_ready()

    def _finish_ready(self) -> None:
        """Register kernels that are compiled, so that the next program finds them."""
        for future in self._mode.raw_futures:
            if future.done():
                self._mode.future_kernels[future._key].result(ignore_errors=True)

    def __exit__(self, *error: Any) -> None:
        try:
            self._mode.__exit__(*error)
        finally:
            self._threads.shutdown()


class _CompileAndLoad(CompileOnce):
    """Mode that also loads a kernel's machine code and its launcher, one at a time.

    A launcher is a C module, which kernels share; all launchers have one name. Python loads a module that it knows
    already into `sys.modules[name]`, where a thread that has just loaded another launcher would find it.
    """

    def __init__(self, device: torch.device, threads: ThreadPoolExecutor) -> None:
        super().__init__(threads, ignore_errors=True)
        self._device = device
        self._load = threading.Lock()
        self._loads = 0  # the thread that has the lock
        self._build = build._build  # the C compiler

    def __enter__(self) -> Any:
        build._build = self._build_unlocked
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            build._build = self._build

    def compile_locked(self, key: str, compile_fn: Callable[[], Any]) -> Any:
        kernel = super().compile_locked(key, compile_fn)
        with self.locked(_launcher_source(kernel) or f"load {key}"), self._alone(), torch.cuda.device(self._device):
            _ = kernel.run  # this property builds the launcher and loads both
        return kernel

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._load:
            self._loads = threading.get_ident()
            try:
                yield
            finally:
                self._loads = 0

    def _build_unlocked(self, *args: Any, **kwargs: Any) -> Any:
        """Let others load while a launcher is built."""
        if self._loads != threading.get_ident():
            return self._build(*args, **kwargs)
        self._loads = 0
        self._load.release()
        try:
            return self._build(*args, **kwargs)
        finally:
            self._load.acquire()
            self._loads = threading.get_ident()


def _launcher_source(kernel: Any) -> str:
    """Return the C source of a kernel's launcher, which only one thread should build; "" if Triton, from 3.7 on, builds
    none.
    """
    make = getattr(driver, "make_launcher", None)
    return "" if make is None else make({}, kernel.src.signature, getattr(kernel.metadata, "tensordesc_meta", None))


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


_log = logging.getLogger(__name__)
_current = threading.local()


class CompiledInStep(RuntimeError):
    """A step needs a compilation, but the engine was started with fail_on_compilation."""


class Compilations:
    """Count the kernels that Triton compiles, or loads from its cache, within `watch`.

    count  kernels so far
    fail   raise CompiledInStep instead of compiling
    """

    def __init__(self, fail: bool = False) -> None:
        self.count = 0
        self.fail = fail
        _install()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count compilations of the calling thread until the block ends."""
        _current.compilations = self
        try:
            yield
        finally:
            _current.compilations = None

    def note(self, kernel: str) -> None:
        """Count a kernel before it is compiled. Raises CompiledInStep if `fail`."""
        self.count += 1
        if self.fail:
            raise CompiledInStep(
                f"a step needs the kernel {kernel}, which was not compiled at the start; start without "
                "fail_on_compilation to compile it in the step"
            )
        _log.warning("a step waits for the compiler: kernel %s", kernel)


def _install() -> None:
    """Add a hook to Triton that notes compilations, once per process."""
    hook = knobs.runtime.jit_cache_hook
    if getattr(hook, "watches_steps", False):
        return

    def before_compilation(**launch: Any) -> bool:
        compilations = getattr(_current, "compilations", None)
        if compilations is not None:
            compilations.note(launch["fn"].name)
        return bool(hook(**launch)) if hook is not None else False

    before_compilation.watches_steps = True  # type: ignore[attr-defined]
    knobs.runtime.jit_cache_hook = before_compilation
