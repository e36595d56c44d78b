"""Hopper machine code without a Hopper: what a launch compiles to on sm_90, for tests that assert 'no spills' or 'wgmma present'.

    from support.sm90 import compile_launch

    def test_fits_in_registers():
        x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")      # shapes count, values do not: meta tensors cost nothing
        q, scale = OPS["quantize_rowwise"].fake(x)
        (code,) = compile_launch(OPS["quantize_rowwise"].launch, x, out=(q, scale), pdl=True)
        assert code.spills == 0 and code.registers <= 64

`compile_launch(function, *args, **kwargs)` calls `function` (an op's `launch`, or anything that launches kernels), but compiles each
Triton or Gluon kernel for sm_90 in place of launching it: the very specialisation (constants, alignment, warps, stages) that the GPU
would get. It returns one `MachineCode` a kernel, in launch order. `launched(op, *args)` is the short form for an op whose outputs
come from `op.fake`. Write such tests unmarked: in the interpreter's process (TRITON_INTERPRET=1) there is nothing to compile and they
skip themselves.
"""
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import triton
from sidestream.ops.registry import Op, as_outputs
from sidestream.ops.triton_support import INTERPRETED
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_SASS_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)", re.MULTILINE)
_PTX_LINE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:[.:]+\w+)*)", re.MULTILINE)


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel. `sass` counts instructions by mnemonic ("QGMMA", "LDG"), `ptx` by their full dotted name."""

    name: str
    num_warps: int
    registers: int
    spills: int  # static count of spill instructions (local-memory loads and stores)
    local_bytes: int  # stack frame a thread
    shared_bytes: int
    sass: Counter[str] = field(repr=False)
    ptx: Counter[str] = field(repr=False)
    sass_text: str = field(repr=False)
    ptx_text: str = field(repr=False)

    @property
    def instructions(self) -> int:
        """Static SASS instructions."""
        return self.sass.total()

    def ptx_count(self, prefix: str) -> int:
        """PTX instructions whose name starts with `prefix`: "wgmma.mma_async", "cp.async.bulk.tensor", "griddepcontrol"."""
        return sum(count for name, count in self.ptx.items() if name.startswith(prefix))

    def summary(self) -> str:
        """One line for a person."""
        notable = ("QGMMA", "HGMMA", "IGMMA", "HMMA", "IMMA", "UTMALDG", "LDGSTS", "LDG", "STG", "LDS", "STS", "SHFL", "BAR", "MUFU", "F2FP")
        counts = " ".join(f"{word}={self.sass[word]}" for word in notable if self.sass[word])
        return (f"{self.name}: warps={self.num_warps} registers={self.registers} spills={self.spills} local={self.local_bytes}B "
                f"shared={self.shared_bytes}B instructions={self.instructions} {counts}")


class _Hopper:
    """Stands in for Triton's driver: an sm_90 device that only compiles."""

    def get_current_device(self) -> str:
        return "compile-only sm_90"  # the JIT caches kernels by device: a name of its own keeps these apart from real ones

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_launch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[MachineCode]:
    """Call `function`, compiling for sm_90 every kernel that it would have launched."""
    if INTERPRETED:
        pytest.skip("nothing is compiled under TRITON_INTERPRET=1")
    compiled: list[MachineCode] = []
    run = JITFunction.run

    def compile_instead(self: JITFunction, *kernel_args: Any, **kernel_kwargs: Any) -> Any:
        kernel = run(self, *kernel_args, **{**kernel_kwargs, "warmup": True})
        compiled.append(_read(kernel))
        return kernel

    previous = driver._active
    driver.set_active(_Hopper())
    try:
        with patch.object(JITFunction, "run", compile_instead):
            function(*args, **kwargs)
    finally:
        driver._active = previous
    return compiled


def launched(op: Op, *args: Any, **options: Any) -> list[MachineCode]:
    """What `op.launch(*args, **options)` compiles to, with outputs from `op.fake`."""
    return compile_launch(op.launch, *args, out=as_outputs(op.fake(*args)), **options)


def _read(kernel: Any) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        sass_text = _tool("nvdisasm", "-c", cubin.name)
        resources = _RESOURCES.search(_tool("cuobjdump", "-res-usage", cubin.name))
    if resources is None:
        raise RuntimeError(f"cuobjdump reported no resource usage for {kernel.metadata.name}")
    sass = Counter(match[1] for match in _SASS_LINE.finditer(sass_text))
    registers, stack, static_shared, _ = map(int, resources.groups())
    return MachineCode(
        name=kernel.metadata.name,
        num_warps=kernel.metadata.num_warps,
        registers=registers,
        spills=sass["LDL"] + sass["STL"],
        local_bytes=stack,
        shared_bytes=static_shared + kernel.metadata.shared,
        sass=sass,
        ptx=Counter(match[1] for match in _PTX_LINE.finditer(kernel.asm["ptx"])),
        sass_text=sass_text,
        ptx_text=kernel.asm["ptx"],
    )


def _tool(name: str, *args: str) -> str:
    done = subprocess.run([os.path.join(_TOOLS, name), *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
