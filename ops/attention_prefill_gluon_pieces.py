"""The pieces of attention_prefill_gluon: layouts, which tile an item is, conversion to fp16, the softmax of one step."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_gluon_pieces import load_box

ROWS = gl.constexpr(64)  # of a group of four warps; a tile has twice as many
STEP = gl.constexpr(128)  # keys a step: two pages
WIDENED = gl.constexpr(16.0)  # on every fp16 scale, so that small ones keep their bits; the end takes it out


@gluon.constexpr_function
def score_layout(FP8):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32 if FP8 else 16])


@gluon.constexpr_function
def output_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])


@gluon.constexpr_function
def converter_layout(WARPS):
    """[32 tokens, 128 dims]: half a warp reads 8 values a lane from tokens 0 and 4, a quarter writes 128 bytes of one: neither meets a bank twice."""
    rows = [[2, 0], [8, 0], [16, 0]]
    own = 3 - (WARPS.bit_length() - 1)
    lanes = [[0, 8], [0, 16], [0, 32], [4, 0], [1, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 64], *rows[3 - own :]], lanes, rows[: 3 - own], [], [32, 128])


@gluon.jit
def find_tile(item, query_start, context_lens, tokens, sequences, tiles, HK: gl.constexpr, TILE: gl.constexpr, SEQUENCES: gl.constexpr, WARPS: gl.constexpr):
    """(kv head, sequence, first token, end of the sequence's tokens, its first position, steps, unmasked steps) of an item; without tokens if first >= end."""
    head = item % HK
    tile = tiles - 1 - item // HK
    index = gl.arange(0, SEQUENCES, gl.BlockedLayout([SEQUENCES // 32], [32], [WARPS], [0]))
    begin = gl.load(query_start + index, mask=index <= sequences, other=0)
    begins_before = (begin // TILE + index <= tile) & (index <= sequences)
    sequence = gl.sum(begins_before.to(gl.int32), 0) - 1
    is_real = sequence < sequences
    start = gl.load(query_start + sequence)
    end = gl.load(query_start + sequence + 1, mask=is_real, other=tokens)
    length = gl.load(context_lens + sequence, mask=is_real, other=0)
    first_token = start + (tile - start // TILE - sequence) * TILE
    position = length - end + first_token
    seen = gl.minimum(length, gl.maximum(position + TILE, 0))
    steps = (seen + STEP - 1) // STEP
    whole = gl.minimum(gl.maximum(position + 1, 0), length) // STEP
    return head, sequence, first_token, end, position, length, gl.where(first_token < end, steps, 0), whole


@gluon.jit
def tile_rows(first_token, end, head, LAYOUT: gl.constexpr, HK: gl.constexpr, GROUP: gl.constexpr):
    """Offsets of a group's 64 rows in q or out, from the first one, and which there are."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    offsets = ((row // GROUP * (HK * GROUP) + row % GROUP) * 128)[:, None] + dim[None, :]
    return offsets, (first_token + row // GROUP < end)[:, None] & (dim < 128)[None, :]


@gluon.jit
def fetch(boxes, ring, ready, slot, first_row, second_row):
    """K or V of two pages to stage `slot`: boxes of 64 rows and 128 bytes each."""
    load_box(boxes, [first_row, 0], ready, ring.index(slot * 2))
    load_box(boxes, [second_row, 0], ready, ring.index(slot * 2 + 1))


@gluon.jit
def widen(x, scale):
    """Four neighbours of e4m3 or int8 to fp16, times their row's scale: a pair of equal fp16 in 32 bits."""
    if x.dtype == gl.int8:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 x, a, b, middle;
                 mov.b32 middle, 0x64806480;
                 xor.b32 x, $2, 0x80808080;
                 prmt.b32 a, x, 0x64646464, 0x4140;
                 prmt.b32 b, x, 0x64646464, 0x4342;
                 sub.rn.f16x2 a, a, middle;
                 sub.rn.f16x2 b, b, middle;
                 mul.rn.f16x2 $0, a, $3;
                 mul.rn.f16x2 $1, b, $3; }""",
            "=r,=r,r,r,r,r,r", [x, scale], dtype=gl.float16, is_pure=True, pack=4)  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 a, b; .reg .b16 low, high;
                 mov.b32 {low, high}, $2;
                 cvt.rn.f16x2.e4m3x2 a, low;
                 cvt.rn.f16x2.e4m3x2 b, high;
                 mul.rn.f16x2 $0, a, $3;
                 mul.rn.f16x2 $1, b, $3; }""",
            "=r,=r,r,r,r,r,r", [x, scale], dtype=gl.float16, is_pure=True, pack=4)  # fmt: skip


@gluon.jit
def pack(p):
    """fp32 [64, 128] to pairs of fp16 neighbours in 32 bits [64, 64]: carried from step to step, single halves would take a register each."""
    even, odd = gl.split(gl.reshape(p, [ROWS, STEP // 2, 2]))
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs):
    """`pack`'s result as the left operand of P V."""
    even, odd = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    p = gl.reshape(gl.join(even, odd), [ROWS, STEP]).to(gl.float16, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, output_layout(), 2), assert_trivial=True)


@gluon.jit
def weigh(scores, key_scales, slot, factor, top, total, first_key, position, FP8_SCORES: gl.constexpr, MASK: gl.constexpr):
    """The online softmax of one step: (packed probabilities, what the older ones keep, new maximum, new sum). Maxima are before `factor`."""
    SCORES: gl.constexpr = score_layout(FP8_SCORES)
    if FP8_SCORES:
        scores = scores * key_scales.index(slot).load(gl.SliceLayout(0, SCORES))[None, :]
    if MASK:
        key = gl.arange(0, STEP, gl.SliceLayout(0, SCORES))
        scores = gl.where(key[None, :] <= (position - first_key)[:, None], scores, -float("inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    keep = gl.exp2((top - new_top) * factor)
    p = gl.exp2(scores * factor[:, None] - (new_top * factor)[:, None])
    return pack(p), keep, new_top, total * keep + gl.sum(p, 1)
