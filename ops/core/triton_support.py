"""Helpers that make Triton kernels correct on the GPU and in Triton's interpreter.

The interpreter multiplies raw bits in a bf16 `tl.dot`, rounds fp32 -> e4m3 wrongly (carry at binade edges, no
saturation), truncates fp32 -> bf16, and has no PDL instructions. `INTERP` selects exact fp32 arithmetic there, and
launches do not request PDL.
"""

import os
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from triton.runtime.jit import DependenciesFinder

# Fuse products and sums (FMA) explicitly: Triton 3.9 warns that its default will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
INTERP = tl.constexpr(INTERPRETED)

_add_callee = DependenciesFinder._update_hash


def _add_hashed_callee(finder: Any, function: Any) -> None:
    _ = function.cache_key
    _add_callee(finder, function)


# Triton 3.6 adds the constants of a called function before it finds them: a kernel's key in the cache depends on which
# kernels were hashed before it, and another process may not find it
DependenciesFinder._update_hash = _add_hashed_callee


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Return launch keywords for a kernel with a `PDL` constexpr (programmatic dependent launch)."""
    return {"PDL": pdl and not INTERPRETED, "launch_pdl": pdl and not INTERPRETED}


def require_contiguous(op: str, **tensors: Optional[torch.Tensor]) -> None:
    """Raise ValueError unless all given tensors are contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; pass {name}.contiguous()"
            )


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round fp32 to a model dtype, to nearest with ties to even (the interpreter's own cast to bf16 truncates)."""
    if INTERP and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def in_fp32(x):
    """Convert values of a model dtype to fp32."""
    if INTERP or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:  # convert loaded pairs directly: Triton's cast would unpack them first
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high;
                 shl.b32 low, $2, 16;
                 and.b32 high, $2, 0xffff0000;
                 mov.b32 $0, low;
                 mov.b32 $1, high; }""",
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """Round fp32 x to a model dtype and return the result in fp32."""
    if INTERP or dtype != tl.bfloat16:
        return round_to(x, dtype).to(tl.float32)
    else:  # convert pairs: conversions of single values have a quarter of the throughput
        return tl.inline_asm_elementwise(
            """{ .reg .b32 pair, low, high;
                 cvt.rn.bf16x2.f32 pair, $3, $2;
                 shl.b32 low, pair, 16;
                 and.b32 high, pair, 0xffff0000;
                 mov.b32 $0, low;
                 mov.b32 $1, high; }""",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def round_e4m3(x):
    """Round fp32 within +-448 to e4m3, ties to even, and return fp32 (exact in the interpreter too)."""
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    normal = normal.to(tl.float32, bitcast=True)
    magic = 24576.0  # 1.5 * 2**14: adding it leaves multiples of 2**-9, the step of e4m3's subnormals
    subnormal = (x + magic) - magic
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal)


@triton.jit
def to_e4m3(x):
    """Convert fp32 to e4m3 with saturation at +-448."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if INTERP:
        x = round_e4m3(x)
    return x.to(tl.float8e4nv)


@triton.jit
def to_int8(x):
    """Convert fp32 within +-127 to int8, to nearest with ties to even: the last byte of the sum."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # 1.5 * 2**23


@triton.jit
def row_scale(amax, dtype: tl.constexpr = tl.float8e4nv):
    """Return the scale of an int8 or e4m3 row with largest magnitude `amax`."""
    return tl.maximum(amax, 1e-12) / (127.0 if dtype == tl.int8 else 448.0)


@triton.jit
def to_eight_bits(x, dtype: tl.constexpr):
    """Convert fp32 to int8 or e4m3."""
    return to_int8(x) if dtype == tl.int8 else to_e4m3(x)


@triton.jit
def _sums_and_differences(x, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Replace pairs of fp32 x [BLOCK], STEP (a power of two) places apart, by their sum and their difference."""
    pairs = tl.reshape(x, (BLOCK // (2 * STEP), 2, STEP))
    if INTERP:  # reductions other than sums are Python loops there
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (BLOCK,))
    else:
        bits = pairs.to(tl.int32, bitcast=True)
        partner = (bits ^ tl.xor_sum(bits, 1, keep_dims=True)).to(tl.float32, bitcast=True)
        sign = 1.0 - 2.0 * tl.arange(0, 2).to(tl.float32)
        return tl.reshape(partner + pairs * sign[None, :, None], (BLOCK,))


@triton.jit
def butterflies(x, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply blocks of WIDTH (a power of two) columns of fp32 x [BLOCK] by the Hadamard matrix in Sylvester order.

    The matrix has entries 1 and -1. x keeps its layout: a partner is in a register of the same thread, or in another
    lane and read by a shuffle. As in Triton's own sort it is the xor of the pair, xored with the value; the compiler
    removes both operations.
    """
    for stage in tl.static_range(16):
        if 2**stage < WIDTH:
            x = _sums_and_differences(x, BLOCK, 2**stage)
    return x


@triton.jit
def rotate_columns(x, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply blocks of WIDTH columns of fp32 x [BLOCK] by the normalised Hadamard matrix; WIDTH 1 returns x."""
    return butterflies(x, BLOCK, WIDTH) * WIDTH**-0.5 if WIDTH > 1 else x


@triton.jit
def dot_f32(a, b, acc):
    """Return acc + a @ b in fp32, for 16-bit and 8-bit operands; correct in the interpreter too."""
    if INTERP:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def pdl_start(PDL: tl.constexpr):
    """Allow the next kernel to launch, then wait until all earlier kernels have finished and written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def dot_ieee(a, b, acc):
    """Return acc + a @ b accumulated in fp32, without rounding fp32 to tf32; correct in the interpreter too."""
    if INTERP:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
