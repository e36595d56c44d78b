"""Compile a launch without running it and without a GPU: registers, shared memory, spills, instructions.

`compile_launch(function, *args)` calls `function` (such as an op's `launch`) and compiles each Triton or Gluon kernel
in place of launching it, with the same specialisation as on the GPU (constants, alignment, warps, stages). Arguments
may be meta tensors. Triton's cache keeps the results; the disassemblers are those that Triton ships.
"""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
_TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_SASS_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)", re.MULTILINE)
_PTX_LINE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:[.:]+\w+)*)", re.MULTILINE)


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel; shared memory in bytes per CTA, stack (for spilled registers) in bytes per thread."""

    name: str
    function: str  # with its module: sidestream.ops.elementwise.rms_norm._rms_norm_kernel
    num_warps: int
    registers: int
    local_bytes: int
    shared_bytes: int
    ptx_text: str = field(repr=False)
    cubin: bytes = field(repr=False)

    @cached_property
    def sass_text(self) -> str:
        """The disassembly."""
        return _on_cubin(self.cubin, "nvdisasm", "-c")

    @cached_property
    def sass(self) -> Counter[str]:
        """SASS instructions by mnemonic ("QGMMA", "LDG")."""
        return Counter(match[1] for match in _SASS_LINE.finditer(self.sass_text))

    @cached_property
    def ptx(self) -> Counter[str]:
        """PTX instructions by their full dotted name."""
        return Counter(match[1] for match in _PTX_LINE.finditer(self.ptx_text))

    @property
    def spills(self) -> int:
        """Static count of spill instructions (local-memory loads and stores)."""
        return self.sass["LDL"] + self.sass["STL"]

    @property
    def instructions(self) -> int:
        """Static SASS instructions."""
        return self.sass.total()

    def ptx_count(self, prefix: str) -> int:
        """Return the count of PTX instructions that start with `prefix`, such as "wgmma.mma_async" or
        "cp.async.bulk.tensor".
        """
        return sum(count for name, count in self.ptx.items() if name.startswith(prefix))


class _CompileOnly:
    """Replacement for Triton's driver: a device that only compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> str:
        # the JIT caches kernels by device: this name separates these from real ones
        return f"compile-only {self.target.arch}"

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def target_here() -> GPUTarget:
    """Return the target of this machine's GPU, or sm_90 (Hopper) without one."""
    if not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability()
    return GPUTarget("cuda", 10 * major + minor, 32)


def compile_launch(
    function: Callable[..., Any], *args: Any, target: GPUTarget = HOPPER, **kwargs: Any
) -> list[MachineCode]:
    """Call `function`, but compile its kernels for `target` instead of launching them; return one entry per launch.

    Not thread-safe.
    """
    compiled: list[MachineCode] = []
    run = JITFunction.run

    def compile_instead(self: Any, *kernel_args: Any, **kernel_kwargs: Any) -> Any:
        kernel = run(self, *kernel_args, **{**kernel_kwargs, "warmup": True})
        compiled.append(_read(kernel, _function(self)))
        return kernel

    with launches_become(compile_instead, target):
        function(*args, **kwargs)
    return compiled


def name_launches(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Call `function` and return the names of the kernels that it would launch on Hopper, in order. Not thread-safe."""
    names: list[str] = []
    with launches_become(lambda self, *_, **__: names.append(_function(self)), HOPPER):
        function(*args, **kwargs)
    return names


@contextmanager
def launches_become(instead: Callable[..., Any], target: GPUTarget) -> Iterator[None]:
    """Call `instead(kernel, *args, **kwargs)` in place of launches, for `target`. Not thread-safe."""
    previous = driver._active
    driver.set_active(_CompileOnly(target))
    try:
        with patch.object(JITFunction, "run", instead):
            yield
    finally:
        driver._active = previous


def _function(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


def _read(kernel: Any, function: str) -> MachineCode:
    usage = _on_cubin(kernel.asm["cubin"], "cuobjdump", "-res-usage")
    found = _RESOURCES.search(usage)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resource usage for {kernel.metadata.name}: {usage.strip()[:200]}")
    registers, stack, static_shared, _ = map(int, found.groups())
    meta = kernel.metadata
    return MachineCode(
        meta.name,
        function,
        meta.num_warps,
        registers,
        stack,
        static_shared + meta.shared,
        kernel.asm["ptx"],
        kernel.asm["cubin"],
    )


def _on_cubin(cubin: bytes, tool: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [os.path.join(_TOOLS, tool), *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
