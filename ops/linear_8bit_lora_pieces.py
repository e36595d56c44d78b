"""LoRA's second half at the end of a tile of `linear_8bit_lora_gluon.py`: B in eight bits times the tokens' ranks, by pieces of 64 columns."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .attention_gluon_pieces import view_shared
from .linear_8bit_gluon import barrier
from .linear_8bit_lora_streams import GROUP_RANKS, row_layout


@gluon.constexpr_function
def sums_layout(WARPS, COLUMNS, K):
    """The layout of sums over instructions that are COLUMNS wide and K deep."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, COLUMNS, K])


@gluon.constexpr_function
def ranks_layout(WARPS):
    """The ranks' activations as an operand in registers."""
    return gl.DotOperandLayout(0, sums_layout(WARPS, 64, 32), 4)


@gluon.constexpr_function
def places_layout(WARPS):
    """Tokens x places in a list as an operand in registers."""
    return gl.DotOperandLayout(0, sums_layout(WARPS, 64, 16), 2)


@gluon.constexpr_function
def adapters_at_once(RANK, STAGES):
    """As many as have their rows of B in the ring at the same time."""
    return STAGES * GROUP_RANKS // RANK


@gluon.jit
def sigmoid(x):
    """Of fp32, some units in the last place off."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",  # -log2(e), 1
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def multiply_add(a, b, c):
    """a * b + c, here and now: LLVM would put it off to where the sum is used, and keep all three until then."""
    return gl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def distance(a, b):
    """a - b, here and now: what is made of it takes registers until it is used for the last time."""
    return gl.inline_asm_elementwise("sub.s32 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def own_rows(ranks, apart):
    """The ranks of tokens that are zero places apart, zeros for others; four at once, which LLVM would pick apart."""
    return gl.inline_asm_elementwise("{ .reg .pred p; setp.eq.s32 p, $2, 0; selp.b32 $0, $1, 0, p; }", "=r,r,r,r,r,r", [ranks, apart], dtype=gl.int8,
                                     is_pure=True, pack=4)  # fmt: skip


@gluon.jit
def load_scales(b_scale, listed, first, count, n, column, RANK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """B's scales of the adapters of a list from its entry `first` on, for the gates' and the ups' two pieces of 64 columns; zeros behind the last adapter."""
    ENTRIES: gl.constexpr = adapters_at_once(RANK, STAGES)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 128 // RANK], [64 // RANK, RANK // 2], [WARPS, 1], [1, 0])
    entry = first + gl.arange(0, ENTRIES, gl.SliceLayout(1, LOAD))
    adapter = gl.load(listed + 1 + entry, mask=entry < count, other=0)
    source = b_scale + adapter[:, None] * n + column + gl.arange(0, 64, gl.SliceLayout(0, LOAD))[None, :]
    present = (entry < count)[:, None]
    gate, gate_right = gl.load(source, mask=present, other=0.0), gl.load(source + 64, mask=present, other=0.0)
    source += n // 2
    return gate, gate_right, gl.load(source, mask=present, other=0.0), gl.load(source + 64, mask=present, other=0.0)


@gluon.jit
def _scale_operands(staging, RANK: gl.constexpr, STAGES: gl.constexpr):
    """Places of a list x 64 columns, by pieces: the scales' first parts, then the second ones."""
    ROWS: gl.constexpr = 2 * adapters_at_once(RANK, STAGES)
    return view_shared(staging, gl.bfloat16, [128 * 128 // (64 * ROWS), ROWS, 64],
                       gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def put_scales(staging, scales, RANK: gl.constexpr, STAGES: gl.constexpr):
    """B's scales to the staging buffer, once the tile or the adapters before are through with it."""
    ENTRIES: gl.constexpr = adapters_at_once(RANK, STAGES)
    operands = _scale_operands(staging, RANK, STAGES)
    tma.store_wait(0)
    barrier()
    for piece in gl.static_range(4):
        high = scales[piece].to(gl.bfloat16)
        operands.index(piece).slice(0, ENTRIES).store(high)
        operands.index(piece).slice(ENTRIES, ENTRIES).store((scales[piece] - high.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()
    barrier()


@gluon.jit
def fetch(adapter_index, ranks, rank_scales, places, row, tokens, RANK: gl.constexpr, BLOCK_T: gl.constexpr, WARPS: gl.constexpr):
    """(ranks, their scale) of the gate's and of the up's half, and the adapters' places; -1 and zeros for tokens without an adapter."""
    RANKS: gl.constexpr = ranks_layout(WARPS)
    SUMS: gl.constexpr = sums_layout(WARPS, 64, 32)
    token = row + gl.arange(0, BLOCK_T, gl.SliceLayout(1, RANKS))
    own = gl.load(adapter_index + token, mask=token < tokens, other=-1) >= 0
    source = ranks + token[:, None] * (2 * RANK) + gl.arange(0, RANK, gl.SliceLayout(0, RANKS))[None, :]
    gate = gl.load(source, mask=own[:, None], other=0, cache_modifier=".cg")
    up = gl.load(source + RANK, mask=own[:, None], other=0, cache_modifier=".cg")
    place = gl.load(places + token, mask=own, other=-1, cache_modifier=".cg")
    token = row + gl.arange(0, BLOCK_T, gl.SliceLayout(1, SUMS))
    own = gl.load(adapter_index + token, mask=token < tokens, other=-1) >= 0
    gate_scale = gl.load(rank_scales + token * 2, mask=own, other=0.0, cache_modifier=".cg")
    return gate, gate_scale, up, gl.load(rank_scales + token * 2 + 1, mask=own, other=0.0, cache_modifier=".cg"), place


@gluon.jit
def _chosen(place, first, RANK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """Ones at each token's place of a list that counts from `first`, for both parts of its scales."""
    ENTRIES: gl.constexpr = adapters_at_once(RANK, STAGES)
    LAYOUT: gl.constexpr = places_layout(WARPS)
    entry = gl.arange(0, 2 * ENTRIES, gl.SliceLayout(0, LAYOUT)) % ENTRIES
    place = gl.convert_layout(distance(place, first), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return gl.where(place[:, None] == entry[None, :], 1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def add_piece(shared, value, ranks, rank_scale, place, unit, first, groups, HALF: gl.constexpr, PIECE: gl.constexpr, RANK: gl.constexpr,
               BLOCK_T: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """value + B times the ranks, of 64 columns; the rows are the ring's `groups` units from `unit` on, adapters of the list from its entry `first` on."""
    PER: gl.constexpr = GROUP_RANKS // RANK
    weights, staging, ready = shared[0], shared[3], shared[4]
    SUMS: gl.constexpr = sums_layout(WARPS, 64, 32)
    WIDE_SUMS: gl.constexpr = sums_layout(WARPS, 64, 16)
    scales = _scale_operands(staging, RANK, STAGES).index(2 * HALF + PIECE)
    total = gl.zeros([BLOCK_T, 64], gl.int32, SUMS)
    for group in range(groups):
        slot = (unit + group) % STAGES
        mbarrier.wait(ready.index(slot), (unit + group) // STAGES & 1)
        rows = view_shared(weights.index(slot), weights.dtype, [256 // RANK, 128, RANK], row_layout(RANK))
        for each in gl.static_range(PER):
            own = own_rows(ranks, (place - (first + group * PER + each))[:, None])
            total = warpgroup_mma(own, rows.index(2 * each + HALF).slice(PIECE * 64, 64).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
    chosen = _chosen(place, first, RANK, STAGES, WARPS)
    factor = warpgroup_mma(chosen, scales, gl.zeros([BLOCK_T, 64], gl.float32, WIDE_SUMS), use_acc=False, is_async=True)
    factor = warpgroup_mma_wait(0, deps=(factor,))
    return multiply_add(total.to(gl.float32) * rank_scale[:, None], gl.convert_layout(factor, SUMS, assert_trivial=True), value)
