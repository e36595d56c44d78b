"""Functions of decode_gluon's loop: register layouts, operands, the online softmax of one page.

  S^T     = K Q^T with the tokens as the tall operand, so that a group of up to 8 heads is one narrow tile; 16 columns
          hold several draft rows with their heads. K goes from shared memory to registers 16 bytes per lane, two e4m3
          values to fp16 per instruction. The tensor core expects other values in that lane. But a sum may have any
          order, so the reduction index is permuted, in Q too (`load_queries`).
  O^T     = V^T P^T. V needs pairs of tokens in one register: one byte permutation per four values, then the same
          conversion (`value_operand`). The rows of O^T are permuted, and `merge_warps` restores their order.
  P       is multiplied by V's scale and 2^8 before rounding to 16 bits (see numerics), and transposed by movmatrix.

Q is rounded once to fp16 (bf16 with a bf16 cache); K's scale multiplies the scores.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..core.gluon_support import tma_load

PROBABILITY_SHIFT = gl.constexpr(8.0)  # log2 of numerics.PROBABILITY_SCALE
LOWEST = gl.constexpr(-1.0e30)


# Layouts. Lane 4 * r + c. Shared loads are 16 bytes per lane, without bank conflicts under the 128-byte swizzle.
@triton.constexpr_function
def token_bits(WARPS):
    """Return (register bits, warp bits) of a page's tokens: tokens 16 and 32 may belong to other warps."""
    own = 64 // WARPS
    return [t for t in (8, 16, 32) if t < own], [t for t in (16, 32) if t >= own]


@triton.constexpr_function
def key_layout(WARPS, BF16):
    """Return the layout of K [64 tokens, 128 dims]: r selects the token modulo 8.

    c selects the dims from 32 c (e4m3), or 16 c and 64 + 16 c (bf16).
    """
    registers, warps = token_bits(WARPS)
    dims = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64 if BF16 else 16]]
    lanes = ([[0, 16], [0, 32]] if BF16 else [[0, 32], [0, 64]]) + [[1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(dims + [[t, 0] for t in registers], lanes, [[t, 0] for t in warps], [], [64, 128])


@triton.constexpr_function
def value_layout(WARPS, BF16):
    """Return the layout of V [64 tokens, 128 dims]: c selects pairs of tokens.

    r selects the dims from 16 r (e4m3), or 8 r and 64 + 8 r (bf16).
    """
    registers, warps = token_bits(WARPS)
    dims = [[0, 1], [0, 2], [0, 4], [0, 64 if BF16 else 8], [1, 0]]
    lanes = [[2, 0], [4, 0]] + ([[0, 8], [0, 16], [0, 32]] if BF16 else [[0, 16], [0, 32], [0, 64]])
    return gl.DistributedLinearLayout(dims + [[t, 0] for t in registers], lanes, [[t, 0] for t in warps], [], [64, 128])


@triton.constexpr_function
def token_layout(WARPS):
    """Return the layout of one value per token [64], in the lane of that token's row of S^T."""
    registers, warps = token_bits(WARPS)
    return gl.DistributedLinearLayout(
        [[t] for t in registers], [[0], [0], [1], [2], [4]], [[t] for t in warps], [], [64]
    )


@triton.constexpr_function
def product_layout(WARPS):
    """Return the layout of S^T [WARPS, tokens, 8 or 16] and O^T [WARPS, 128, 8 or 16]: mma.sync m16n8k16 per warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])


@triton.constexpr_function
def tall_operand(WARPS):
    """Return the layout of the first operand of the products: K, or V^T."""
    return gl.DotOperandLayout(0, product_layout(WARPS), 2)


@triton.constexpr_function
def narrow_operand(WARPS):
    """Return the layout of the second operand of the products: Q^T, or the probabilities."""
    return gl.DotOperandLayout(1, product_layout(WARPS), 2)


@triton.constexpr_function
def merge_layout(WARPS):
    """Return the layout of [entries to merge, heads, 128]: a lane has all entries of four dims."""
    return gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])


@gluon.jit
def places(column, rows, G: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Return (row of q, query head of the group) of each column; (0, column) for one row per sequence.

    `rows` is a tuple for a tile of drafts: its first row in the sequence, the number of rows of the sequence, the index
    of the sequence's first row, and the index of its first padding row. With one row per sequence the caller's pointer
    is that row.
    """
    if ROWS == 1:
        return gl.zeros_like(column), column
    else:
        first, count, begin, spare = rows
        row = first + column // G
        return gl.where(row < count, begin + row, spare + row) * HEADS, column % G


@gluon.jit
def load_queries(
    q, rows, score_scale, G: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, USED: gl.constexpr,
    COLUMNS: gl.constexpr, WARPS: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Load Q^T [WARPS, 128, COLUMNS], the same for every warp, with the reduction index permuted like K's.

    Scaled to log2 units, except in bf16 (exact).
    """
    OPERAND: gl.constexpr = narrow_operand(WARPS)
    k = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, OPERAND)))
    lane = (k >> 1) & 3
    pair = ((k >> 3) & 1) * 2 + (k & 1)
    dim = (k >> 6) * 64 + lane * 16 + ((k >> 4) & 3) * 4 + pair if BF16 else lane * 32 + (k >> 4) * 4 + pair
    row, head = places(column, rows, G, HEADS, ROWS)
    x = gl.load(
        q + (row + head)[None, None, :] * 128 + dim[None, :, None], mask=(column < USED)[None, None, :], other=0.0
    )
    x = x.to(gl.bfloat16) if BF16 else (x.to(gl.float32) * score_scale).to(gl.float16)
    if WARPS > 1:
        x = x + gl.zeros([WARPS, 128, COLUMNS], x.dtype, OPERAND)
    return x


@gluon.jit
def to_half(x):
    """Convert e4m3 or int8 to fp16, exactly.

    An int8 byte with its sign bit flipped, below a byte 0x64, is the fp16 number value + 1152.
    """
    if x.dtype == gl.int8:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 x, a, b, middle;
                 mov.b32 middle, 0x64806480;
                 xor.b32 x, $2, 0x80808080;
                 prmt.b32 a, x, 0x64646464, 0x4140;
                 prmt.b32 b, x, 0x64646464, 0x4342;
                 sub.rn.f16x2 $0, a, middle;
                 sub.rn.f16x2 $1, b, middle; }""",
            "=r,=r,r",
            [x],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return x.to(gl.float16)


@gluon.jit
def key_operand(k, WARPS: gl.constexpr, BF16: gl.constexpr):
    """Convert K [64, 128] to the tall operand [WARPS, tokens, 128] without moving values between lanes."""
    TOKENS: gl.constexpr = 64 // WARPS
    if BF16:
        k = gl.permute(gl.reshape(k, [WARPS, TOKENS, 2, 4, 4, 2, 2]), (0, 1, 2, 4, 5, 3, 6))
    else:
        k = gl.permute(gl.reshape(to_half(k), [WARPS, TOKENS, 4, 8, 2, 2]), (0, 1, 3, 4, 2, 5))
    return gl.convert_layout(gl.reshape(k, [WARPS, TOKENS, 128]), tall_operand(WARPS), assert_trivial=True)


@gluon.jit
def value_operand(v, WARPS: gl.constexpr, BF16: gl.constexpr):
    """Convert V [64, 128] to the tall operand V^T [WARPS, 128, tokens]; `merge_warps` restores the row order."""
    TOKENS: gl.constexpr = 64 // WARPS
    if BF16:
        v = gl.permute(gl.reshape(v, [WARPS, TOKENS, 2, 8, 4, 2]), (0, 2, 4, 5, 3, 1))
    else:
        even, odd = gl.split(gl.permute(gl.reshape(v, [WARPS, TOKENS // 2, 2, 128]), (0, 1, 3, 2)))
        # interleave the bytes of four dims of two adjacent tokens, then make {token, token + 1} of each dim
        if v.dtype == gl.int8:
            low, high = gl.inline_asm_elementwise(
                """{ .reg .b32 x, y, ab, cd, a, b, c, d, middle;
                     mov.b32 middle, 0x64806480;
                     xor.b32 x, $4, 0x80808080;
                     xor.b32 y, $5, 0x80808080;
                     prmt.b32 ab, x, y, 0x5140;
                     prmt.b32 cd, x, y, 0x7362;
                     prmt.b32 a, ab, 0x64646464, 0x4140;
                     prmt.b32 b, ab, 0x64646464, 0x4342;
                     prmt.b32 c, cd, 0x64646464, 0x4140;
                     prmt.b32 d, cd, 0x64646464, 0x4342;
                     sub.rn.f16x2 $0, a, middle;
                     sub.rn.f16x2 $1, b, middle;
                     sub.rn.f16x2 $2, c, middle;
                     sub.rn.f16x2 $3, d, middle; }""",
                "=r,=r,=r,=r,r,r",
                [even, odd],
                dtype=(gl.float16, gl.float16),
                is_pure=True,
                pack=4,
            )
        else:
            low, high = gl.inline_asm_elementwise(
                """{ .reg .b32 ab, cd; .reg .b16 a, b, c, d;
                     prmt.b32 ab, $4, $5, 0x5140;
                     prmt.b32 cd, $4, $5, 0x7362;
                     mov.b32 {a, b}, ab;
                     mov.b32 {c, d}, cd;
                     cvt.rn.f16x2.e4m3x2 $0, a;
                     cvt.rn.f16x2.e4m3x2 $1, b;
                     cvt.rn.f16x2.e4m3x2 $2, c;
                     cvt.rn.f16x2.e4m3x2 $3, d; }""",
                "=r,=r,=r,=r,r,r",
                [even, odd],
                dtype=(gl.float16, gl.float16),
                is_pure=True,
                pack=4,
            )
        v = gl.permute(gl.reshape(gl.join(low, high), [WARPS, TOKENS // 2, 8, 4, 2, 2, 2]), (0, 3, 6, 4, 2, 1, 5))
    return gl.convert_layout(gl.reshape(v, [WARPS, 128, TOKENS]), tall_operand(WARPS), assert_trivial=True)


@gluon.jit
def per_token(x, WARPS: gl.constexpr):
    """Convert [64] in token_layout to [WARPS, tokens], aligned with the rows of S^T."""
    return gl.convert_layout(
        gl.reshape(x, [WARPS, 64 // WARPS]), gl.SliceLayout(2, product_layout(WARPS)), assert_trivial=True
    )


@gluon.jit
def attend(scores, v, v_scale, top, total, acc, seen, COLUMNS: gl.constexpr, WARPS: gl.constexpr, BF16: gl.constexpr):
    """Apply one page of the online softmax, inside the warp. `total` stays a sum per lane until the end."""
    TOKENS: gl.constexpr = 64 // WARPS
    scores = gl.where(seen, scores, -float("inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    keep = gl.exp2(top - new_top)
    p = gl.exp2(scores - (new_top - PROBABILITY_SHIFT)[:, None, :])
    lane_sum = gl.sum(gl.reshape(p, [WARPS, TOKENS // 8, 8, COLUMNS]), 1)
    total = (
        total * gl.convert_layout(keep, gl.SliceLayout(1, lane_sum.type.layout), assert_trivial=True)[:, None, :]
        + lane_sum
    )
    p = p.to(gl.bfloat16) if BF16 else (p * v_scale[:, :, None]).to(gl.float16)
    # transpose each 8 x 8 tile: S^T's accumulator becomes the narrow operand
    p = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=False, pack=2
    )
    p = gl.permute(gl.reshape(p, [WARPS, TOKENS // 8, 8, COLUMNS // 8, 8]), (0, 1, 4, 3, 2))
    p = gl.reshape(p, [WARPS, TOKENS, COLUMNS])
    p = gl.convert_layout(p, narrow_operand(WARPS), assert_trivial=True)
    return new_top, total, mma_v2(value_operand(v, WARPS, BF16), p, acc * keep[:, None, :])


@gluon.jit
def expect_page(ready, slot, BF16: gl.constexpr, wanted):
    """Set the expected bytes of `slot`'s barrier: K and V of a page and head, and the scales of an 8-bit cache."""
    mbarrier.expect(ready.index(slot), 2 * 64 * 128 * 2 if BF16 else 2 * 64 * (128 + 4), wanted)


@gluon.jit
def fetch_page(page_boxes, scale_boxes, pages, scales, ready, slot, row, BF16: gl.constexpr, wanted):
    """Start the copies of row = page * HK + head to `slot`."""
    tma_load(page_boxes, [row * 128, 0], ready.index(slot), pages.index(slot), wanted)
    if not BF16:
        tma_load(scale_boxes, [row, 0], ready.index(slot), scales.index(slot), wanted)
