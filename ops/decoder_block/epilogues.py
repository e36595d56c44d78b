"""Products over a ring of weights, exchange of partial sums, and epilogues of norm and quantization."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..core import dtypes
from ..core.gluon_support import cta_barrier
from ..elementwise import quantize
from .producers import SPLIT, await_count

SILU_ROTATES = gl.constexpr(quantize.SILU_ROTATES)
RESIDUAL_SCALE = gl.constexpr(dtypes.RESIDUAL_SCALE)
RESIDUAL_LARGEST = gl.constexpr(dtypes.RESIDUAL_LARGEST)


@gluon.constexpr_function
def root(width):
    """Return the divisor of a normalised rotation of `width` columns."""
    return math.sqrt(width)


@gluon.constexpr_function
def stages(width):
    """Return the number of stages of a transform of `width` columns."""
    return int(width).bit_length() - 1


@gluon.jit
def issue(ring, ready, rows, rows_ready, used, rows_used, nothing, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr):
    """Start the product of one slot of weights with one block of activations, when both have arrived."""
    slot = used % SLOTS
    row = rows_used % ROW_SLOTS
    mbarrier.wait(ready.index(slot), used // SLOTS & 1)
    mbarrier.wait(rows_ready.index(row), rows_used // ROW_SLOTS & 1)
    return warpgroup_mma(ring.index(slot), rows.index(row).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def multiply(
    ring, ready, empty, rows, scales, rows_ready, rows_empty, used, rows_used, steps, first, second, PAIR: gl.constexpr,
    BLOCK_T: gl.constexpr, SLOTS: gl.constexpr, ROW_SLOTS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add weights times activations over `steps` blocks of K and return (first, second, used, rows_used).

    With PAIR `first` is the gate, `second` up. Each block's product is scaled and added in fp32: its activations have
    their own scale, and the tensor cores' running sum of e4m3 products has only 14 bits (int8 sums and their conversion
    are exact). Products do not overlap: with overlap the slots are freed later, which takes 5 us more per layer.
    """
    nothing = gl.zeros([128, BLOCK_T], gl.int32 if ring.dtype == gl.int8 else gl.float32, LAYOUT)
    for _ in range(steps):
        product = issue(ring, ready, rows, rows_ready, used, rows_used, nothing, SLOTS, ROW_SLOTS)
        scale = scales.index(rows_used % ROW_SLOTS).slice(0, BLOCK_T, dim=1).load(LAYOUT)
        if PAIR:
            up = issue(ring, ready, rows, rows_ready, used + 1, rows_used, nothing, SLOTS, ROW_SLOTS)
            product, up = warpgroup_mma_wait(0, deps=(product, up))
        else:
            product = warpgroup_mma_wait(0, deps=(product,))
        fence_async_shared()  # scales have been read: a barrier does not complete loads
        if PAIR:
            mbarrier.arrive(empty.index(used % SLOTS), count=1)
            used += 1
        mbarrier.arrive(empty.index(used % SLOTS), count=1)
        mbarrier.arrive(rows_empty.index(rows_used % ROW_SLOTS), count=1)
        first += product.to(gl.float32) * scale
        if PAIR:
            second += up.to(gl.float32) * scale
        used += 1
        rows_used += 1
    return first, second, used, rows_used


@gluon.jit
def rotate(values, row, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """Multiply blocks of 2**STAGES adjacent rows of values [128, tokens] fp32 by the Hadamard matrix, not normalised.

    `row`: 0 to 127. In LAYOUT a token's rows are in one warp. Three stages are arithmetic within the thread that has 8
    adjacent rows; further stages read their partners by shuffles. A partner is the xor of the pair, xored with the
    value; the compiler removes both operations.
    """
    for stage in gl.static_range(STAGES):
        pairs = gl.reshape(values.to(gl.int32, bitcast=True), [64 >> stage, 2, 1 << stage, values.shape[1]])
        partner = gl.reshape(pairs ^ gl.xor_sum(pairs, 1, keep_dims=True), values.shape)
        sign = (1 - 2 * (row >> stage & 1)).to(gl.float32)
        values = (
            gl.convert_layout(partner, LAYOUT, assert_trivial=True).to(gl.float32, bitcast=True)
            + values * sign[:, None]
        )
    return values


@gluon.jit
def to_int8(values):
    """Convert fp32 within +-127 to int8, to nearest with ties to even: the last byte of the sum."""
    return (values + 12582912.0).to(gl.int32, bitcast=True).to(gl.int8)  # 1.5 * 2**23


@gluon.jit
def store_quantized(
    values, q, scale, block, row, token, tokens, WIDTH: gl.constexpr, PADDED: gl.constexpr, ROTATE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Quantize values [128, tokens] fp32 to columns of q [tokens, WIDTH], with one scale per token.

    Scales go to scale [WIDTH / 128, PADDED]. In int8, blocks of ROTATE (8 to 128, a power of two) columns are rotated
    first.
    """
    if q.dtype.element_ty == gl.int8:
        ROOT: gl.constexpr = root(ROTATE)
        values = rotate(values, row, stages(ROTATE), LAYOUT)
        step = gl.maximum(gl.max(gl.abs(values), axis=0) * (1.0 / ROOT), 1e-12) * (1.0 / 127.0)
        steps = to_int8(values * (1.0 / (step * ROOT))[None, :])
    else:
        step = gl.maximum(gl.max(gl.abs(values), axis=0), 1e-12) * (1.0 / 448.0)
        steps = (values / step[None, :]).to(gl.float8e4nv)
    gl.store(q + token[None, :] * WIDTH + (block * 128 + row)[:, None], steps, mask=(token < tokens)[None, :])
    gl.store(scale + block * PADDED + token, step)


@gluon.jit
def inverse_rms(
    squares, token, eps, TILES: gl.constexpr, BLOCK_T: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return 1 / rms of each token from the tiles' sums of squares, added in order."""
    total = gl.zeros([COUNT], gl.float32, gl.SliceLayout(0, LAYOUT))
    for tile in gl.static_range(TILES):
        total += gl.load(squares + tile * BLOCK_T + token, cache_modifier=".cg")
    return gl.rsqrt(total * (1.0 / (TILES * 128)) + eps)


@gluon.jit
def residual_inputs(
    weight_scale, residual, gain, tile, part, tokens, WIDTH: gl.constexpr, BLOCK_T: gl.constexpr, LAYOUT: gl.constexpr
):
    """Load the inputs of `add_residual` that do not depend on other stages, before the products."""
    column = tile * 128 + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    token = part * (BLOCK_T // SPLIT) + gl.arange(0, BLOCK_T // SPLIT, gl.SliceLayout(0, LAYOUT))
    old = gl.load(
        residual + token[None, :] * WIDTH + column[:, None],
        mask=(token < tokens)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    return gl.load(weight_scale + column), gl.load(gain + column), old


@gluon.jit
def publish(
    acc, planes, arrivals, tile, part, tokens, PARTS: gl.constexpr, BLOCK_T: gl.constexpr, LAYOUT: gl.constexpr
):
    """Store this CTA's sums of a tile for the CTAs of the tile's other parts, and count its arrival."""
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    token = gl.arange(0, BLOCK_T, gl.SliceLayout(0, LAYOUT))
    plane = planes + (tile * PARTS + part) * (128 * BLOCK_T)
    gl.store(
        plane + row[:, None] + token[None, :] * 128, gl.convert_layout(acc, LAYOUT), mask=(token < tokens)[None, :]
    )
    cta_barrier()
    gl.atomic_add(arrivals + tile, 1, sem="release")


@gluon.jit
def collect(planes, arrivals, tile, token, PARTS: gl.constexpr, BLOCK_T: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the sums of all parts for some tokens [128, tokens], added in order."""
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    await_count(arrivals + tile, PARTS)
    plane = planes + tile * (PARTS * 128 * BLOCK_T) + row[:, None] + token[None, :] * 128
    total = gl.load(plane, cache_modifier=".cg")
    for other in gl.static_range(1, PARTS):
        total += gl.load(plane + other * (128 * BLOCK_T), cache_modifier=".cg")
    return total


@gluon.jit
def add_residual(
    update, gain, old, done, residual, q, q_scale, squares, tile, part, tokens, WIDTH: gl.constexpr,
    BLOCK_T: gl.constexpr, PADDED: gl.constexpr, ROTATE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Finish a quarter of a tile's tokens: new residual (`update` + old), sum of squares, norm gain, quantization.

    An fp16 residual in a bf16 model is divided by RESIDUAL_SCALE (`core/dtypes.py`).
    """
    SCALED: gl.constexpr = residual.dtype.element_ty == gl.float16 and gain.dtype == gl.bfloat16
    OWN: gl.constexpr = BLOCK_T // SPLIT
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    token = part * OWN + gl.arange(0, OWN, gl.SliceLayout(0, LAYOUT))
    present = (token < tokens)[None, :]
    if SCALED:
        new = old.to(gl.float32) + update * (1.0 / RESIDUAL_SCALE)
        new = gl.where(new > RESIDUAL_LARGEST, RESIDUAL_LARGEST, new)  # NaN stays
        new = gl.where(new < -RESIDUAL_LARGEST, -RESIDUAL_LARGEST, new).to(gl.float16)
        value = new.to(gl.float32) * RESIDUAL_SCALE
    else:
        new = (old.to(gl.float32) + update).to(residual.dtype.element_ty)
        value = new.to(gl.float32)
    gl.store(residual + token[None, :] * WIDTH + (tile * 128 + row)[:, None], new, mask=present)
    value = gl.where(present, value, 0.0)
    gl.store(squares + tile * BLOCK_T + token, gl.sum(value * value, axis=0))
    store_quantized(
        value * gain.to(gl.float32)[:, None], q, q_scale, tile, row, token, tokens, WIDTH, PADDED, ROTATE, LAYOUT
    )
    cta_barrier()
    gl.atomic_add(done, 1, sem="release")
