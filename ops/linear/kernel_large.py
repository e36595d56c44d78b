"""linear_8bit in int8 for many tokens, bound by arithmetic, in Gluon: tokens are the M operand.

Tiles have up to 192 x 256 results. A producer warp streams both operands through a ring by TMA. Two or three consumer
warpgroups multiply their own tokens of the tile by all of its weights: they share only the loads, so one can store
results while another multiplies. int32 sums are exact, so the tensor cores keep them over all of K. Results are stored
through shared memory by TMA, 64 columns at a time.

Tiles are ordered for L2 reuse: program p of G computes tiles p, p + G, p + 2G, ... The ring continues across tiles, so
the next tile is loaded during the stores.
"""

from typing import Optional

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.gluon_support import cta_barrier, gdc_launch_dependents, gdc_wait, tma_load, tma_store
from .kernel_selection import BLOCK_K, LARGE_PIECE, LinearConfig, WorkSplit

GROUP = 16  # token tiles that are multiplied by all weights before the next token tiles
PRODUCER_REGISTERS = 24
_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_STAGING = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def corner(wave, program, programs, token_tiles, weight_tiles, GROUP: gl.constexpr):
    """Return (token tile, weight tile) of a program's tile: GROUP token tiles with all weights, then the next ones."""
    tile = program + wave * programs
    group = tile // (GROUP * weight_tiles)
    height = gl.minimum(token_tiles - group * GROUP, GROUP)
    inside = tile - group * GROUP * weight_tiles
    return group * GROUP + inside % height, inside // height


@gluon.jit
def produce(
    weight_desc, q_desc, shared, sizes, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load one box of weights and CONSUMERS boxes of ROWS tokens per step (producer warp).

    `shared` and `sizes` are the kernel's tuples.
    """
    weights, tokens_ring, _staging, ready, empty = shared
    waves, program, programs, steps, token_tiles, weight_tiles, _tokens, _n = sizes
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    unit = 0
    for wave in range(waves):
        token_tile, weight_tile = corner(wave, program, programs, token_tiles, weight_tiles, GROUP)
        for step in range(steps):
            slot = unit % STAGES
            # a wait for the phase before a new barrier's first phase returns at once
            mbarrier.wait(empty.index(slot), (unit // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(slot), (CONSUMERS * ROWS + BLOCK_N) * BLOCK_K)
            tma_load(weight_desc, [weight_tile * BLOCK_N, step * BLOCK_K], ready.index(slot), weights.index(slot))
            for i in gl.static_range(CONSUMERS):
                tma_load(
                    q_desc,
                    [(token_tile * CONSUMERS + i) * ROWS, step * BLOCK_K],
                    ready.index(slot),
                    tokens_ring.index(slot * CONSUMERS + i),
                )
            unit += 1


@gluon.jit
def halves(x, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Return the halves of a piece of `WIDTH` columns, which are in different registers of the same threads."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH // 2, 32]
    )
    left, right = x.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _pieces(x, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the pieces of 64 columns of a tile's sums."""
    left, right = halves(x, ROWS, BLOCK_N)
    if BLOCK_N == 128:
        return left, right
    else:
        first, second = halves(left, ROWS, BLOCK_N // 2)
        third, fourth = halves(right, ROWS, BLOCK_N // 2)
        return first, second, third, fourth


@gluon.jit
def store(value, staging, out_desc, row, column, PENDING: gl.constexpr):
    """Store one piece; the staging buffer is reused after an older store has read it."""
    tma.store_wait(PENDING)
    cta_barrier()
    staging.store(value.to(out_desc.dtype))
    fence_async_shared()
    cta_barrier()
    tma_store(out_desc, [row, column], staging)


@gluon.jit
def _finish(
    total, staging, out_desc, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, row, column, tokens, n,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, HAS_DELTA: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PENDING: gl.constexpr,
):  # fmt: skip
    """Apply scales and addends, and store one piece."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    token_scale = gl.load(scale_ptr + rows, mask=rows < tokens, other=0.0)
    row_scale = gl.load(weight_scale_ptr + columns, mask=columns < n, other=0.0)
    value = total.to(gl.float32) * token_scale[:, None] * row_scale[None, :]
    at = rows.to(gl.int64)[:, None] * n + columns[None, :]
    valid = (rows < tokens)[:, None] & (columns < n)[None, :]
    if HAS_DELTA:
        value += gl.load(delta_ptr + at, mask=valid, other=0.0).to(gl.float32)
    if HAS_RESIDUAL:
        value += gl.load(residual_ptr + at, mask=valid, other=0.0).to(gl.float32)
    store(value, staging, out_desc, row, column, PENDING)


@gluon.jit
def multiply_step(shared, acc, unit, step, CONSUMER: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Start the product of the ring's unit `unit`, and free the previous unit; step 0 starts a new sum."""
    weights, tokens_ring, _staging, ready, empty = shared
    slot = unit % STAGES
    mbarrier.wait(ready.index(slot), unit // STAGES & 1)
    acc = warpgroup_mma(
        tokens_ring.index(slot * CONSUMERS + CONSUMER),
        weights.index(slot).permute((1, 0)),
        acc,
        use_acc=step > 0,
        is_async=True,
    )
    acc = warpgroup_mma_wait(1, deps=(acc,))
    # the previous step's product is done
    mbarrier.arrive(empty.index((unit + STAGES - 1) % STAGES), count=1, pred=step > 0)
    return acc


@gluon.jit
def _consume(
    shared, memory, sizes, CONSUMER: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, BUFFERS: gl.constexpr, PIECE: gl.constexpr, HAS_DELTA: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BLOCK_N == 128 or BLOCK_N == 256)
    _weights, _tokens_ring, staging, _ready, empty = shared
    out_desc, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr = memory
    waves, program, programs, steps, token_tiles, weight_tiles, tokens, n = sizes
    # Triton has no int8 instruction of 256 columns
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.int32, MMA)
    if PDL:
        gdc_wait()
    unit = 0
    for wave in range(waves):
        acc = nothing
        for step in range(steps):
            acc = multiply_step(shared, acc, unit, step, CONSUMER, STAGES, CONSUMERS)
            unit += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((unit + STAGES - 1) % STAGES), count=1)
        token_tile, weight_tile = corner(wave, program, programs, token_tiles, weight_tiles, GROUP)
        row = (token_tile * CONSUMERS + CONSUMER) * ROWS
        column = weight_tile * BLOCK_N
        pieces = _pieces(acc, ROWS, BLOCK_N)
        for i in gl.static_range(BLOCK_N // PIECE):
            _finish(
                pieces[i], staging.index(CONSUMER * BUFFERS + i % BUFFERS), out_desc, scale_ptr, weight_scale_ptr,
                delta_ptr, residual_ptr, row, column + i * PIECE, tokens, n, ROWS, PIECE, HAS_DELTA, HAS_RESIDUAL,
                BUFFERS - 1,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])  # one compilation for every token count
def _linear_int8_large(
    weight_desc, q_desc, out_desc, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, tokens, n, k,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    BUFFERS: gl.constexpr, PIECE: gl.constexpr, HAS_DELTA: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    GROUP: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = (k + BLOCK_K - 1) // BLOCK_K
    token_tiles = (tokens + CONSUMERS * ROWS - 1) // (CONSUMERS * ROWS)
    weight_tiles = (n + BLOCK_N - 1) // BLOCK_N
    waves = (token_tiles * weight_tiles - program + programs - 1) // programs
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    tokens_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], q_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS * BUFFERS, ROWS, PIECE], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    shared = (weights, tokens_ring, staging, ready, empty)
    memory = (out_desc, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr)
    sizes = (waves, program, programs, steps, token_tiles, weight_tiles, tokens, n)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        shared,
                        memory,
                        sizes,
                        0,
                        ROWS,
                        BLOCK_N,
                        STAGES,
                        CONSUMERS,
                        BUFFERS,
                        PIECE,
                        HAS_DELTA,
                        HAS_RESIDUAL,
                        GROUP,
                        PDL,
                    ),
                ),
                (
                    _consume,
                    (
                        shared,
                        memory,
                        sizes,
                        1,
                        ROWS,
                        BLOCK_N,
                        STAGES,
                        CONSUMERS,
                        BUFFERS,
                        PIECE,
                        HAS_DELTA,
                        HAS_RESIDUAL,
                        GROUP,
                        PDL,
                    ),
                ),
                (produce, (weight_desc, q_desc, shared, sizes, ROWS, BLOCK_N, BLOCK_K, STAGES, CONSUMERS, GROUP, PDL)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        shared,
                        memory,
                        sizes,
                        0,
                        ROWS,
                        BLOCK_N,
                        STAGES,
                        CONSUMERS,
                        BUFFERS,
                        PIECE,
                        HAS_DELTA,
                        HAS_RESIDUAL,
                        GROUP,
                        PDL,
                    ),
                ),
                (
                    _consume,
                    (
                        shared,
                        memory,
                        sizes,
                        1,
                        ROWS,
                        BLOCK_N,
                        STAGES,
                        CONSUMERS,
                        BUFFERS,
                        PIECE,
                        HAS_DELTA,
                        HAS_RESIDUAL,
                        GROUP,
                        PDL,
                    ),
                ),
                (
                    _consume,
                    (
                        shared,
                        memory,
                        sizes,
                        2,
                        ROWS,
                        BLOCK_N,
                        STAGES,
                        CONSUMERS,
                        BUFFERS,
                        PIECE,
                        HAS_DELTA,
                        HAS_RESIDUAL,
                        GROUP,
                        PDL,
                    ),
                ),
                (produce, (weight_desc, q_desc, shared, sizes, ROWS, BLOCK_N, BLOCK_K, STAGES, CONSUMERS, GROUP, PDL)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def launch_large(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    delta: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
    out: torch.Tensor,
    config: LinearConfig,
    split: WorkSplit,
    pdl: bool,
) -> None:
    """Run the kernel for int8 operands and 16-bit results; arguments as in `launch_triton`.

    q, weight and out must be 16-byte aligned, N a multiple of 8.
    """
    (tokens, k), n = q.shape, weight.shape[0]
    consumers = config.warps // 4
    rows = config.block_t // consumers
    # The launch encodes the tensor maps as kernel arguments, so a captured graph has its own copies.
    weight_desc = TensorDescriptor.from_tensor(weight, [config.block_n, BLOCK_K], _SWIZZLED)
    q_desc = TensorDescriptor.from_tensor(q, [rows, BLOCK_K], _SWIZZLED)
    out_desc = TensorDescriptor.from_tensor(out, [rows, LARGE_PIECE], _STAGING)
    _linear_int8_large[split.programs,](
        weight_desc, q_desc, out_desc, scale, weight_scale, scale if delta is None else delta,
        scale if residual is None else residual, tokens, n, k, ROWS=rows, BLOCK_N=config.block_n, BLOCK_K=BLOCK_K,
        STAGES=config.stages, CONSUMERS=consumers, BUFFERS=1 if rows > 64 else 2, PIECE=LARGE_PIECE,
        HAS_DELTA=delta is not None, HAS_RESIDUAL=residual is not None, GROUP=GROUP,
        CONSUMER_REGISTERS=160 if consumers == 3 else 232, PRODUCER_REGISTERS=PRODUCER_REGISTERS, PDL=pdl, num_warps=4,
        maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip
