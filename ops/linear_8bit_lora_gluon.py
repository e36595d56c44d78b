"""silu(gate) * up of a packed projection in int8 with its LoRA branch inside, in Gluon: the wide kernel's tiles, and programs beside them that shrink.

The first programs hold tiles of 128 tokens x (128 gates + their 128 ups), whole in K. The others multiply the tokens with A: one item of theirs is an adapter
of a token tile's list, all of K, dense; of its results each token keeps those of its own adapter. They are rounded to bf16 and from there to eight bits, a
scale for each token and half, stored with the adapter's place in the list, and counted. (A split of K would end earlier, but nobody waits for it: an item has
as many steps as a tile, and lighter ones.)

A tile fetches its tokens' ranks when a quarter of its steps is left, and the ring is full. B's rows come through the same ring behind the last step and are
multiplied as they lie there: a token's ranks are the operand in registers, zero but where the adapter is its own, so one sum holds the products of all
adapters. Which of B's scales a token needs is found by the tensor cores too: a row that is one at its adapter's place, times the scales of the list's adapters,
each cut into two parts of bf16 (2**-17 off). All this goes by pieces of 64 columns, beside which the tile's own sums fit the registers. Without adapters in
the batch a tile has none of it.

Items are counted by one counter, which the last tile to have seen them all sets to zero again. Tiles wait for items, so all programs must be resident at once.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .decoder_block_pieces import to_int8
from .decoder_block_streams import await_count
from .linear_8bit_gluon import barrier, gdc_wait
from .linear_8bit_lora_pieces import adapters_at_once, add_piece, fetch, load_scales, put_scales, sigmoid, sums_layout
from .linear_8bit_lora_streams import GROUP_RANKS, count_items, find_item, produce
from .linear_8bit_wide import _corner, _halves, tma_store


@gluon.constexpr_function
def operand_layout(RANK):
    """B in bf16 as the tensor cores read it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * RANK, element_bitwidth=16, rank=2)


@gluon.jit
def _multiply(shared, acc, begin, end, first, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Adds the products of the ring's units begin..end, the first ROWS rows of each; the sum starts anew with unit `first`."""
    weights, tokens_ring, ready, empty = shared[0], shared[1], shared[4], shared[5]
    for i in range(begin, end):
        slot = i % STAGES
        mbarrier.wait(ready.index(slot), i // STAGES & 1)
        rows = weights.index(slot).slice(0, ROWS)
        acc = warpgroup_mma(tokens_ring.index(slot), rows.permute((1, 0)), acc, use_acc=i > first, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > begin)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((end - 1) % STAGES), count=1)
    return acc


# Shrinking


@gluon.jit
def _store_ranks(value, ranks, rank_scales, token, tokens_own, HALF: gl.constexpr, RANK: gl.constexpr, WARPS: gl.constexpr):
    """One half's ranks [tokens, RANK] of an item in eight bits, with a scale for each token."""
    LAYOUT: gl.constexpr = sums_layout(WARPS, RANK, 32)
    rank = HALF * RANK + gl.arange(0, RANK, gl.SliceLayout(0, LAYOUT))
    token = gl.convert_layout(token, gl.SliceLayout(1, LAYOUT))
    own = gl.convert_layout(tokens_own, gl.SliceLayout(1, LAYOUT))
    step = gl.div_rn(gl.maximum(gl.max(gl.abs(value), axis=1), 1e-12), 127.0)
    rounded = to_int8(gl.div_rn(value, step[:, None]))
    gl.store(ranks + token[:, None] * (2 * RANK) + rank[None, :], rounded, mask=own[:, None])
    gl.store(rank_scales + token * 2 + HALF, step, mask=own)


@gluon.jit
def _shrink(shared, memory, sizes, shrinking, RANK: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """This program's items: ranks [tokens, 2 * RANK] of the tokens whose adapter is the item's."""
    SUMS: gl.constexpr = sums_layout(WARPS, 2 * RANK, 32)
    scale, a_scale, _b_scale, adapter_index, active, ranks, rank_scales, places, counter = memory
    program, multiplying, _waves, steps, token_tiles, _weight_tiles, tokens, stride = sizes
    nothing = gl.zeros([BLOCK_T, 2 * RANK], gl.int32, SUMS)
    rank = gl.arange(0, 2 * RANK, gl.SliceLayout(0, SUMS))
    used = 0
    for item in range(program - multiplying, count_items(active, stride, token_tiles), shrinking):
        token_tile, entry, adapter = find_item(active, stride, item)
        token = token_tile * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(1, SUMS))
        own = gl.load(adapter_index + token, mask=token < tokens, other=-1) == adapter
        token_scale = gl.load(scale + token, mask=own, other=0.0)
        row_scale = gl.load(a_scale + adapter * (2 * RANK) + rank)
        gl.store(places + token, gl.zeros_like(token) + entry, mask=own)
        total = _multiply(shared, nothing, used, used + steps, used, 2 * RANK, STAGES)
        used += steps
        value = total.to(gl.float32) * token_scale[:, None] * row_scale[None, :]
        gate, up = _halves(value.to(gl.bfloat16).to(gl.float32), BLOCK_T, 2 * RANK, WARPS)
        _store_ranks(gate, ranks, rank_scales, token, own, 0, RANK, WARPS)
        _store_ranks(up, ranks, rank_scales, token, own, 1, RANK, WARPS)
        barrier()
        gl.atomic_add(counter, 1, sem="release")


# Tiles


@gluon.jit
def _scaled(total, token_scale, scales, BLOCK_T: gl.constexpr, WARPS: gl.constexpr):
    """One half's sums times the scales of tokens and rows, in two pieces."""
    left, right = _halves(total, BLOCK_T, 128, WARPS)
    SUMS: gl.constexpr = sums_layout(WARPS, 64, 32)
    left = left.to(gl.float32) * token_scale[:, None] * scales.slice(0, 64, dim=1).load(SUMS)
    return left, right.to(gl.float32) * token_scale[:, None] * scales.slice(64, 64, dim=1).load(SUMS)


@gluon.jit
def _store(left, right, staging, out_boxes, row, column):
    """A tile's two pieces to memory."""
    tma.store_wait(0)
    barrier()
    staging.index(0).store(left.to(out_boxes.dtype))
    staging.index(1).store(right.to(out_boxes.dtype))
    fence_async_shared()
    barrier()
    tma_store(out_boxes, [row, column], staging.index(0))
    tma_store(out_boxes, [row, column + 64], staging.index(1))


@gluon.jit
def _multiply_tiles(shared, memory, sizes, out_boxes, RANK: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
                    WARPS: gl.constexpr):
    PER: gl.constexpr = GROUP_RANKS // RANK
    ROUND: gl.constexpr = adapters_at_once(RANK, STAGES)
    SUMS: gl.constexpr = sums_layout(WARPS, 64, 32)
    _weights, _tokens_ring, scales, staging, _ready, empty = shared
    scale, _a_scale, b_scale, adapter_index, active, ranks, rank_scales, places, counter = memory
    program, multiplying, _waves, steps, token_tiles, weight_tiles, tokens, stride = sizes
    nothing = gl.zeros([BLOCK_T, 256], gl.int32, sums_layout(WARPS, 128, 32))
    items = count_items(active, stride, token_tiles)
    late = steps // 4
    n = weight_tiles * 256
    used = 0
    for tile in range(program, token_tiles * weight_tiles, multiplying):
        token_tile, weight_tile = _corner(tile, token_tiles, weight_tiles, GROUP)
        row = token_tile * BLOCK_T
        column = weight_tile * 128
        token = row + gl.arange(0, BLOCK_T, gl.SliceLayout(1, SUMS))
        token_scale = gl.load(scale + token, mask=token < tokens, other=0.0)
        listed = active + token_tile * stride
        count = gl.load(listed)
        b_scales = load_scales(b_scale, listed, 0, count, n, column, RANK, STAGES, WARPS)
        total = _multiply(shared, nothing, used, used + steps - late, used, 256, STAGES)
        used += steps - late
        if (tile < multiplying) & (items > 0):  # a program's first tile
            await_count(counter, items)
            if gl.atomic_add(counter, 1, sem="relaxed") == items + multiplying - 1:  # the last one to have seen them all
                gl.store(counter, 0)
        if count > 0:
            put_scales(staging, b_scales, RANK, STAGES)
        gate_ranks, gate_scale, up_ranks, up_scale, place = fetch(adapter_index, ranks, rank_scales, places, row, tokens, RANK, BLOCK_T, WARPS)
        total = _multiply(shared, total, used, used + late, -1, 256, STAGES)
        used += late
        own_scales = tile // multiplying % 2 * 2
        gate_sums, up_sums = _halves(total, BLOCK_T, 256, WARPS)
        gate, gate_right = _scaled(gate_sums, token_scale, scales.index(own_scales), BLOCK_T, WARPS)
        up, up_right = _scaled(up_sums, token_scale, scales.index(own_scales + 1), BLOCK_T, WARPS)
        for first in range(0, count, ROUND):
            if first > 0:
                put_scales(staging, load_scales(b_scale, listed, first, count, n, column, RANK, STAGES, WARPS), RANK, STAGES)
            groups = (gl.minimum(count - first, ROUND) + PER - 1) // PER
            gate = add_piece(shared, gate, gate_ranks, gate_scale, place, used, first, groups, 0, 0, RANK, BLOCK_T, STAGES, WARPS)
            gate_right = add_piece(shared, gate_right, gate_ranks, gate_scale, place, used, first, groups, 0, 1, RANK, BLOCK_T, STAGES, WARPS)
            up = add_piece(shared, up, up_ranks, up_scale, place, used, first, groups, 1, 0, RANK, BLOCK_T, STAGES, WARPS)
            up_right = add_piece(shared, up_right, up_ranks, up_scale, place, used, first, groups, 1, 1, RANK, BLOCK_T, STAGES, WARPS)
            barrier()  # both warpgroups are through with the rows
            for group in range(groups):
                mbarrier.arrive(empty.index((used + group) % STAGES), count=1)
            used += groups
        _store(gate * sigmoid(gate) * up, gate_right * sigmoid(gate_right) * up_right, staging, out_boxes, row, column)
    tma.store_wait(0)


@gluon.jit
def _consume(shared, memory, sizes, shrinking, out_boxes, RANK: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
             WARPS: gl.constexpr, PDL: gl.constexpr):
    if PDL:
        gdc_wait()
    if sizes[0] < sizes[1]:
        _multiply_tiles(shared, memory, sizes, out_boxes, RANK, BLOCK_T, STAGES, GROUP, WARPS)
    else:
        _shrink(shared, memory, sizes, shrinking, RANK, BLOCK_T, STAGES, WARPS)


@gluon.jit(do_not_specialize=["tokens", "multiplying", "shrinking", "stride"])  # one compilation for every token count
def linear_8bit_lora_kernel(
    weight_boxes, token_boxes, scale_boxes, a_boxes, b_boxes, out_boxes, scale, a_scale, b_scale, adapter_index, active, ranks, rank_scales, places, counter,
    tokens, multiplying, shrinking, stride,
    N: gl.constexpr, K: gl.constexpr, RANK: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`*_boxes` are TMA descriptors; scratch: `ranks` [T, 2 * RANK] int8, `rank_scales` [T, 2] fp32, `places` [T] int32.

    `active`: lists that are `stride` apart, one for each token tile. That the weight's sizes are constants leaves the consumers more registers.
    """
    gl.static_assert(BLOCK_T == 128)
    program = gl.program_id(0)
    steps: gl.constexpr = K // BLOCK_K
    token_tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    weight_tiles: gl.constexpr = N // 256
    waves = (token_tiles * weight_tiles - program + multiplying - 1) // multiplying
    weights = gl.allocate_shared_memory(weight_boxes.dtype, [STAGES, 256, BLOCK_K], weight_boxes.layout)
    tokens_ring = gl.allocate_shared_memory(token_boxes.dtype, [STAGES, BLOCK_T, BLOCK_K], token_boxes.layout)
    scales = gl.allocate_shared_memory(gl.float32, [4, 1, 128], scale_boxes.layout)
    staging = gl.allocate_shared_memory(out_boxes.dtype, [2, BLOCK_T, 64], out_boxes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    boxes = (weight_boxes, token_boxes, scale_boxes, a_boxes, b_boxes)
    shared = (weights, tokens_ring, scales, staging, ready, empty)
    memory = (scale, a_scale, b_scale, adapter_index, active, ranks, rank_scales, places, counter)
    sizes = (program, multiplying, waves, steps, token_tiles, weight_tiles, tokens, stride)
    gl.warp_specialize([
        (_consume, (shared, memory, sizes, shrinking, out_boxes, RANK, BLOCK_T, STAGES, GROUP, num_warps, PDL)),
        (produce, (boxes, shared, memory, sizes, shrinking, RANK, BLOCK_T, BLOCK_K, STAGES, GROUP, PDL)),
    ], [1], [PRODUCER_REGISTERS])
