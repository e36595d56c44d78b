"""Gluon's names in Triton 3.6 and in later releases, and helpers for every Gluon kernel.

`gdc_wait` and `gdc_launch_dependents` are programmatic dependent launch.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
gdc_wait = tl.extra.cuda.gdc_wait
gdc_launch_dependents = tl.extra.cuda.gdc_launch_dependents


@gluon.constexpr_function
def plain_layout():
    """Return the layout of unswizzled 32-bit words."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def view_shared(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Return the same shared memory viewed as another dtype, shape and layout."""
    if PUBLIC_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)
