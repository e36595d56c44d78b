"""Hopper machine code without a Hopper, for tests that assert 'no spills' or 'wgmma present'.

    from support.sm90 import compile_launch

    def test_fits_in_registers():
        x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")      # shapes count, values do not: meta tensors
                                                                            cost nothing
        q, scale = OPS["quantize_rowwise"].fake(x)
        (code,) = compile_launch(OPS["quantize_rowwise"].launch, x, out=(q, scale), pdl=True)
        assert code.spills == 0 and code.registers <= 64

`launched(op, *args)` is the short form for an op whose outputs come from `op.fake`. Write such tests unmarked: in the
interpreter's process (TRITON_INTERPRET=1) there is nothing to compile and they skip themselves.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from sidestream.compiler.cost import machine_code
from sidestream.compiler.cost.machine_code import MachineCode
from sidestream.ops.core.registry import Op, as_outputs
from sidestream.ops.core.triton_support import INTERPRETED

__all__ = ["MachineCode", "compile_launch", "launched", "reads_under_way"]

SHARED_MEMORY = 228 * 1024
"""Bytes of shared memory of an SM of Hopper (CUDA C++ Programming Guide, compute capability 9.0)."""
_HANDED_OVER = re.compile(r"mbarrier\.arrive\.(?!expect_tx)|cp\.async\.bulk\.tensor\.\w+\.shared")


def compile_launch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[MachineCode]:
    """Call `function`, compiling for sm_90 every kernel that it would have launched. Fails for one that cannot run."""
    if INTERPRETED:
        pytest.skip("nothing is compiled under TRITON_INTERPRET=1")
    compiled = machine_code.compile_launch(function, *args, **kwargs)
    for code in compiled:
        assert code.shared_bytes <= SHARED_MEMORY, f"{code.name} needs {code.shared_bytes} bytes of shared memory"
    return compiled


def launched(op: Op, *args: Any, **options: Any) -> list[MachineCode]:
    """What `op.launch(*args, **options)` compiles to, with outputs from `op.fake`."""
    return compile_launch(op.launch, *args, out=as_outputs(op.fake(*args)), **options)


def reads_under_way(code: MachineCode) -> list[str]:
    """Loads from shared memory that may still be under way when their memory is handed to TMA: in a basic block of the
    PTX, those before an arrival or a copy without a proxy fence between. A barrier between does not end them.
    """
    found, reads = [], list[str]()
    for line in code.ptx_text.splitlines():
        if line.startswith("$L__BB") or "fence.proxy.async" in line:
            reads = []
        elif "ld.shared" in line:
            reads.append(line.strip())
        elif _HANDED_OVER.search(line):
            found += reads
            reads = []
    return found
