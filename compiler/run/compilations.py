"""Kernels that a thread compiles while it watches itself: counted and logged, or refused.

An engine watches the launches of its steps. Everything that a step launches was compiled before, so a compilation
there is a defect that clients see as a pause of seconds.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs

_log = logging.getLogger(__name__)
_current = threading.local()


class CompiledInStep(RuntimeError):
    """A step would have compiled a kernel, and the engine was started with fail_on_compilation."""


class Compilations:
    """Counts the kernels that Triton compiles, or loads from its cache, within `watch`.

    count  kernels so far
    fail   raise CompiledInStep instead of compiling
    """

    def __init__(self, fail: bool = False) -> None:
        self.count = 0
        self.fail = fail
        _install()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what the calling thread compiles until the block ends."""
        _current.compilations = self
        try:
            yield
        finally:
            _current.compilations = None

    def note(self, kernel: str) -> None:
        """Count a kernel that is about to be compiled. Raises CompiledInStep if `fail`."""
        self.count += 1
        if self.fail:
            raise CompiledInStep(
                f"a step would compile the kernel {kernel}, which no program of the start has; start without "
                "fail_on_compilation to let it wait for the compiler"
            )
        _log.warning("a step waits for the compiler: kernel %s", kernel)


def _install() -> None:
    """Have Triton report each compilation, next to the hook that is there."""
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
