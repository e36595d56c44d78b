"""The large kernel of linear_8bit with the second half of LoRA at the end of each tile, in Gluon.

A tile's columns are in one slice, and the tokens of each of its two consumers in one list of `lora_active`. Loads for
the end of a tile overlap with its products. In the first steps the planes of the tokens' ranks are added, one per step.
Then the rows of B of the list's first adapter are loaded, and during the last step's product they are converted to bf16
in the empty staging buffer. So a tile with one adapter ends with two small products, which are added to the scaled
sums. The list's other adapters follow one by one; the rows of each are loaded during the products of the previous one.

A token's ranks are the register operand, zero except for its own adapter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..core.gluon_support import cta_barrier, gdc_wait, plain_layout, view_shared
from ..lora import plan
from .kernel_large import corner, halves, multiply_step, produce, store

LIST_TOKENS = gl.constexpr(plan.LIST_TOKENS)


@gluon.constexpr_function
def operand_layout(RANK):
    """Return the layout of B in bf16 as the tensor cores read it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * RANK, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def sums_layout(WARPS, COLUMNS, K):
    """Return the layout of sums of instructions that are COLUMNS wide and K deep."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, COLUMNS, K])


@gluon.constexpr_function
def ranks_layout(COLUMNS):
    """Return the layout of the ranks as a register operand, for products that are COLUMNS wide."""
    return gl.DotOperandLayout(0, sums_layout(4, COLUMNS, 16), 2)


@gluon.constexpr_function
def rows_layout(CHUNK):
    """Return the layout of loaded rows of B: 16 ranks per thread."""
    return gl.BlockedLayout([1, 16], [512 // CHUNK, CHUNK // 16], [4, 1], [1, 0])


@gluon.jit
def _listed(active, row, tokens, stride):
    """Return (number of adapters in the list of a consumer's tokens, the first adapter or -1)."""
    listed = active + row // LIST_TOKENS * stride
    return gl.load(listed, mask=row < tokens, other=0), gl.load(listed + 1, mask=row < tokens, other=-1)


@gluon.jit
def _load_rows(
    b, b_scale, adapter, n, column, rank, wanted, RANK: gl.constexpr, HALF: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """Load an adapter's rows of B for half a tile's columns, CHUNKS x [HALF, CHUNK] from rank `rank`, and scales."""
    LOAD: gl.constexpr = rows_layout(CHUNK)
    at = adapter * n + column + gl.arange(0, HALF, gl.SliceLayout(1, LOAD))
    source = b + rank + at[:, None] * RANK + gl.arange(0, CHUNK, gl.SliceLayout(0, LOAD))[None, :]
    rows = ()
    for i in gl.static_range(CHUNKS):
        rows += (gl.load(source + i * CHUNK, mask=wanted, other=0),)  # type: ignore[assignment]
    return rows, gl.load(b_scale + at, mask=wanted, other=0.0)


@gluon.jit
def _convert(rows, row_scale, operands, FIRST: gl.constexpr, CHUNKS: gl.constexpr):
    """Convert rows of B times their scales to bf16 in shared memory.

    Adding a small integer to the bits of 1.5 * 2^23 adds it to the value: three fast instructions instead of a slow
    8-bit conversion.
    """
    for i in gl.static_range(CHUNKS):
        value = (rows[i].to(gl.int32) + 0x4B400000).to(gl.float32, bitcast=True) - 12582912.0
        operands.index(FIRST + i).store((value * row_scale[:, None]).to(gl.bfloat16))


@gluon.jit
def _convert_both(left, left_scale, right, right_scale, operands, FIRST: gl.constexpr, CHUNKS: gl.constexpr):
    """Convert both halves' rows to a consumer's part of the staging buffer, after its warps have read it."""
    cta_barrier()
    _convert(left, left_scale, operands, FIRST, CHUNKS)
    _convert(right, right_scale, operands, FIRST + CHUNKS, CHUNKS)
    fence_async_shared()
    cta_barrier()


@gluon.jit
def _expand(
    operands, left, right, ranks, own_adapter, b, b_scale, listed, count, first, second, n, column, FIRST: gl.constexpr,
    RANK: gl.constexpr, HALF: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Add B times the ranks to both halves, by adapter; B of the first adapter's first ranks is in the buffer."""
    GROUPS: gl.constexpr = RANK // (CHUNK * CHUNKS)
    adapter = first
    following = second
    for entry in range(count):
        own = (own_adapter == adapter)[:, None]
        for group in gl.static_range(GROUPS):
            for i in gl.static_range(CHUNKS):
                chosen = gl.where(own, ranks[group * CHUNKS + i], gl.zeros_like(ranks[group * CHUNKS + i]))
                left = warpgroup_mma(chosen, operands.index(FIRST + i).permute((1, 0)), left, is_async=True)
                right = warpgroup_mma(chosen, operands.index(FIRST + CHUNKS + i).permute((1, 0)), right, is_async=True)
            if group == GROUPS - 1:
                adapter = following
                following = gl.load(listed + entry + 3, mask=entry + 2 < count, other=-1)
            rank = (group + 1) % GROUPS * (CHUNK * CHUNKS)
            more = (entry + 1 < count) | (group < GROUPS - 1)
            left_rows, left_scale = _load_rows(b, b_scale, adapter, n, column, rank, more, RANK, HALF, CHUNK, CHUNKS)
            right_rows, right_scale = _load_rows(
                b, b_scale, adapter, n, column + HALF, rank, more, RANK, HALF, CHUNK, CHUNKS
            )
            left, right = warpgroup_mma_wait(0, deps=(left, right))
            if more:
                _convert_both(left_rows, left_scale, right_rows, right_scale, operands, FIRST, CHUNKS)
    return left, right


@gluon.jit
def _scaled(total, token_scale, row_scale, HALF: gl.constexpr):
    """Scale half a tile's sums by tokens and weights, in the layout of bf16 products."""
    value = total.to(gl.float32) * token_scale[:, None] * row_scale.load(sums_layout(4, HALF, 32))
    return gl.convert_layout(value, sums_layout(4, HALF, 16), assert_trivial=True)


@gluon.jit
def _store_halves(
    left, right, staging, out_desc, row, column, ROWS: gl.constexpr, HALF: gl.constexpr, BUFFER: gl.constexpr,
    BUFFERS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    if HALF == PIECE:
        store(left, staging.index(BUFFER), out_desc, row, column, 0)
        store(right, staging.index(BUFFER), out_desc, row, column + PIECE, 0)
    else:
        first, second = halves(left, ROWS, HALF)
        third, fourth = halves(right, ROWS, HALF)
        pieces = (first, second, third, fourth)
        for i in gl.static_range(4):
            store(pieces[i], staging.index(BUFFER + i % BUFFERS), out_desc, row, column + i * PIECE, BUFFERS - 1)


@gluon.jit
def _consume(
    shared, memory, adapters, sizes, CONSUMER: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, BUFFERS: gl.constexpr, PIECE: gl.constexpr, RANK: gl.constexpr,
    ALL_RANKS: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BLOCK_N // 2
    CHUNK: gl.constexpr = min(RANK, 2048 // ROWS)  # ranks summed at a time: 16 registers
    # chunks multiplied at a time: 32 ranks of all columns, which fit a consumer's part of the staging buffer
    CHUNKS: gl.constexpr = min(RANK, 32) // CHUNK
    FIT: gl.constexpr = BUFFERS * ROWS * PIECE // (HALF * CHUNK)
    FIRST: gl.constexpr = CONSUMER * FIT
    RANKS: gl.constexpr = ranks_layout(HALF)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    gl.static_assert(FIT >= 2 * CHUNKS)
    ONE_ROW: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    staging, empty = shared[2], shared[4]
    row_scales, out_desc, scale, weight_scale, planes, b, b_scale = memory
    adapter_index, active, stride, splits = adapters
    waves, program, programs, steps, token_tiles, weight_tiles, tokens, n = sizes
    operands = view_shared(staging, gl.bfloat16, [CONSUMERS * FIT, HALF, CHUNK], operand_layout(CHUNK))
    nothing = gl.zeros([ROWS, BLOCK_N], gl.int32, SUMS)
    no_ranks = gl.zeros([ROWS, CHUNK], gl.float32, RANKS)
    rank = gl.arange(0, CHUNK, gl.SliceLayout(0, RANKS))
    weight = gl.arange(0, HALF, gl.SliceLayout(0, ONE_ROW))[None, :]
    if PDL:
        gdc_wait()
    token_tile, weight_tile = corner(0, program, programs, token_tiles, weight_tiles, GROUP)
    count, first = _listed(active, (token_tile * CONSUMERS + CONSUMER) * ROWS, tokens, stride)
    unit = 0
    for wave in range(waves):
        token_tile, weight_tile = corner(wave, program, programs, token_tiles, weight_tiles, GROUP)
        row = (token_tile * CONSUMERS + CONSUMER) * ROWS
        column = weight_tile * BLOCK_N
        own = row + gl.arange(0, ROWS, gl.SliceLayout(1, RANKS))
        wanted = (own < tokens) & (count > 0)
        part = gl.where(column >= SECOND, 1, 0) + gl.where(column >= THIRD, 1, 0)
        source = planes + part * RANK + own[:, None] * ALL_RANKS + rank[None, :]
        plane = gl.load(source, mask=wanted[:, None], other=0.0)
        # start the product first, so that it overlaps with the wait for the plane
        acc = multiply_step(shared, nothing, unit, 0, CONSUMER, STAGES, CONSUMERS)
        unit += 1
        ranks = ()
        for i in gl.static_range(RANK // CHUNK):
            total = no_ranks
            if i > 0:
                plane = gl.load(source + i * CHUNK, mask=wanted[:, None], other=0.0)
            for split in range(splits):
                acc = multiply_step(shared, acc, unit, 1 + i * splits + split, CONSUMER, STAGES, CONSUMERS)
                unit += 1
                total += plane
                plane = gl.load(
                    source + i * CHUNK + (split + 1) * (tokens * ALL_RANKS),
                    mask=wanted[:, None] & (split + 1 < splits),
                    other=0.0,
                )
            ranks += (total.to(gl.bfloat16),)  # type: ignore[assignment]
        left_rows, left_scale = _load_rows(b, b_scale, first, n, column, 0, count > 0, RANK, HALF, CHUNK, CHUNKS)
        right_rows, right_scale = _load_rows(
            b, b_scale, first, n, column + HALF, 0, count > 0, RANK, HALF, CHUNK, CHUNKS
        )
        listed = active + row // LIST_TOKENS * stride
        second = gl.load(listed + 2, mask=count > 1, other=-1)
        own_adapter = gl.load(adapter_index + own, mask=wanted, other=-1)
        token = row + gl.arange(0, ROWS, gl.SliceLayout(1, sums_layout(4, HALF, 32)))
        token_scale = gl.load(scale + token, mask=token < tokens, other=0.0)
        left_weight_scale = gl.load(weight_scale + column + weight)
        right_weight_scale = gl.load(weight_scale + column + HALF + weight)
        token_tile, _weight_tile = corner(
            gl.minimum(wave + 1, waves - 1), program, programs, token_tiles, weight_tiles, GROUP
        )
        next_count, next_first = _listed(active, (token_tile * CONSUMERS + CONSUMER) * ROWS, tokens, stride)
        for step in range(1 + RANK // CHUNK * splits, steps):
            acc = multiply_step(shared, acc, unit, step, CONSUMER, STAGES, CONSUMERS)
            unit += 1
        row_scales.index(2 * CONSUMER).store(left_weight_scale)
        row_scales.index(2 * CONSUMER + 1).store(right_weight_scale)
        if count > 0:
            tma.store_wait(0)  # the previous tile's stores are done
            _convert_both(left_rows, left_scale, right_rows, right_scale, operands, FIRST, CHUNKS)
        cta_barrier()
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((unit + STAGES - 1) % STAGES), count=1)
        left_sums, right_sums = halves(acc, ROWS, BLOCK_N)
        left = _scaled(left_sums, token_scale, row_scales.index(2 * CONSUMER), HALF)
        right = _scaled(right_sums, token_scale, row_scales.index(2 * CONSUMER + 1), HALF)
        if count > 0:
            left, right = _expand(
                operands, left, right, ranks, own_adapter, b, b_scale, listed, count, first, second, n, column, FIRST,
                RANK, HALF, CHUNK, CHUNKS,
            )  # fmt: skip
        _store_halves(left, right, staging, out_desc, row, column, ROWS, HALF, CONSUMER * BUFFERS, BUFFERS, PIECE)
        count, first = next_count, next_first
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "token_tiles", "splits"])  # one compilation for every token count
def linear_8bit_lora_large_kernel(
    weight_desc, q_desc, out_desc, scale, weight_scale, planes, b, b_scale, adapter_index, active, tokens, token_tiles,
    steps, splits, stride, N: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, RANK: gl.constexpr,
    ALL_RANKS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, BUFFERS: gl.constexpr, PIECE: gl.constexpr, GROUP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Run one program of the launch: T tokens, N outputs, K inputs, S adapter slots of rank R.

    weight_desc, q_desc, out_desc   TMA boxes [BLOCK_N, BLOCK_K] of the weights [N, K] and [ROWS, BLOCK_K] of the
                                    activations [T, K], both int8, and [ROWS, PIECE] of the result [T, N] bf16
    scale, weight_scale             [T] and [N] fp32
    planes                          [splits, T, ALL_RANKS] fp32 of `lora_shrink`
    b, b_scale                      [S, N, R] int8 and [S, N] fp32
    adapter_index, active           [T] int32; the lists of `lora_active`, with row stride `stride` = S + 1
    tokens, token_tiles, steps      T, its tiles, and the steps of a tile along K
    SECOND, THIRD                   first columns of the second and the third slice, or N
    RANK, ALL_RANKS                 R; R times the number of slices
    ROWS, BLOCK_N, BLOCK_K          tokens of a consumer, columns of a tile, columns of K in a step
    STAGES, CONSUMERS, BUFFERS      stages of the ring; consumer warpgroups; staging buffers of each
    PIECE, GROUP                    columns of a store; token tiles that are multiplied by all weights before the next
    *_REGISTERS, PDL, num_warps     registers per thread; programmatic dependent launch; warps of a consumer

    There are more constants, and more values computed by the launch, than in the large kernel: this saves registers of
    the consumers.
    """
    gl.static_assert(CONSUMERS == 2)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    weight_tiles: gl.constexpr = N // BLOCK_N
    waves = (token_tiles * weight_tiles - program + programs - 1) // programs
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    tokens_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], q_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * BUFFERS, ROWS, PIECE], out_desc.layout)
    row_scales = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, 1, BLOCK_N // 2], plain_layout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    shared = (weights, tokens_ring, staging, ready, empty)
    memory = (row_scales, out_desc, scale, weight_scale, planes, b, b_scale)
    adapters = (adapter_index, active, stride, splits)
    sizes = (waves, program, programs, steps, token_tiles, weight_tiles, tokens, N)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    shared,
                    memory,
                    adapters,
                    sizes,
                    0,
                    ROWS,
                    BLOCK_N,
                    STAGES,
                    CONSUMERS,
                    BUFFERS,
                    PIECE,
                    RANK,
                    ALL_RANKS,
                    SECOND,
                    THIRD,
                    GROUP,
                    PDL,
                ),
            ),
            (
                _consume,
                (
                    shared,
                    memory,
                    adapters,
                    sizes,
                    1,
                    ROWS,
                    BLOCK_N,
                    STAGES,
                    CONSUMERS,
                    BUFFERS,
                    PIECE,
                    RANK,
                    ALL_RANKS,
                    SECOND,
                    THIRD,
                    GROUP,
                    PDL,
                ),
            ),
            (produce, (weight_desc, q_desc, shared, sizes, ROWS, BLOCK_N, BLOCK_K, STAGES, CONSUMERS, GROUP, PDL)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
