"""What every Triton kernel here needs to be right on the GPU and in Triton's interpreter alike.

The interpreter multiplies raw bits in a bf16 `tl.dot`, rounds fp32 -> e4m3 wrongly (carry at binade edges, no
saturation), truncates fp32 -> bf16, and lacks PDL's instructions: `INTERP` picks exact fp32 arithmetic there, and
launches never ask for PDL.
"""

import os
from typing import Any, Optional

import torch
import triton
import triton.language as tl

# Products and sums become one instruction, as they always did: Triton 3.9 warns that its default will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
INTERP = tl.constexpr(INTERPRETED)
E4M3_MAX = tl.constexpr(448.0)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Launch keywords of a kernel with a `PDL` constexpr: programmatic dependent launch, never in the interpreter."""
    return {"PDL": pdl and not INTERPRETED, "launch_pdl": pdl and not INTERPRETED}


def require_contiguous(op: str, **tensors: Optional[torch.Tensor]) -> None:
    """Raise ValueError for an argument whose rows a kernel would misread."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; pass {name}.contiguous()"
            )


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 -> a model dtype, to nearest with ties to even (the interpreter's own cast to bf16 truncates)."""
    if INTERP and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def in_fp32(x):
    """Values of a model dtype in fp32."""
    if INTERP or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:  # straight from the pairs that a load brings, which a cast takes apart first
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
    """What a model dtype holds of fp32 x, still in fp32."""
    if INTERP or dtype != tl.bfloat16:
        return round_to(x, dtype).to(tl.float32)
    else:  # two at once: a conversion of one runs at a quarter of their rate
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
    """fp32 already within +-448 -> the nearest e4m3 value, ties to even, still in fp32 (exact in the interpreter
    too).
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    normal = normal.to(tl.float32, bitcast=True)
    magic = 24576.0  # 1.5 * 2**14: adding it leaves multiples of 2**-9, the step of e4m3's subnormals
    subnormal = (x + magic) - magic
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal)


@triton.jit
def to_e4m3(x):
    """fp32 -> e4m3 with saturation at +-448."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if INTERP:
        x = round_e4m3(x)
    return x.to(tl.float8e4nv)


@triton.jit
def to_int8(x):
    """fp32 that its own scale brings within +-127 -> int8, to nearest with ties to even: what is left of the sum's
    last byte.
    """
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # 1.5 * 2**23


@triton.jit
def row_scale(amax, dtype: tl.constexpr = tl.float8e4nv):
    """The rowwise scale of a row of int8 or e4m3 whose largest magnitude is `amax`."""
    return tl.maximum(amax, 1e-12) / (127.0 if dtype == tl.int8 else 448.0)


@triton.jit
def to_eight_bits(x, dtype: tl.constexpr):
    """fp32 -> int8 or e4m3."""
    return to_int8(x) if dtype == tl.int8 else to_e4m3(x)


@triton.jit
def _sums_and_differences(x, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Of fp32 x [BLOCK] and its own value STEP (a power of two) places further, where the sum is left, and the
    difference.
    """
    pairs = tl.reshape(x, (BLOCK // (2 * STEP), 2, STEP))
    if INTERP:  # a reduction that is no sum is a loop in Python there
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (BLOCK,))
    else:
        bits = pairs.to(tl.int32, bitcast=True)
        partner = (bits ^ tl.xor_sum(bits, 1, keep_dims=True)).to(tl.float32, bitcast=True)
        sign = 1.0 - 2.0 * tl.arange(0, 2).to(tl.float32)
        return tl.reshape(partner + pairs * sign[None, :, None], (BLOCK,))


@triton.jit
def butterflies(x, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Blocks of WIDTH (a power of two) neighbours of fp32 x [BLOCK] times the Hadamard matrix of 1 and -1, in
    Sylvester's order.

    x stays in its layout: a partner in the same thread is a register, one in another lane comes by a shuffle. It is
    found as Triton's own sort finds it: the exclusive or of a pair, and once more of that with a value, of which
    nothing is left in the machine code.
    """
    for stage in tl.static_range(16):
        if 2**stage < WIDTH:
            x = _sums_and_differences(x, BLOCK, 2**stage)
    return x


@triton.jit
def rotate_columns(x, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Blocks of WIDTH neighbours of fp32 x [BLOCK] times the normalised Hadamard matrix; WIDTH 1: x."""
    return butterflies(x, BLOCK, WIDTH) * WIDTH**-0.5 if WIDTH > 1 else x


@triton.jit
def dot_f32(a, b, acc):
    """acc + a @ b in fp32, for 16-bit and 8-bit operands; right in the interpreter too."""
    if INTERP:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def pdl_start(PDL: tl.constexpr):
    """Lets the next kernel launch, then waits until every earlier kernel has finished and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def dot_ieee(a, b, acc):
    """acc + a @ b with fp32 accumulation; fp32 operands are not rounded to tf32. Right in the interpreter too."""
    if INTERP:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
