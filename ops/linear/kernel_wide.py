"""linear_8bit for 65 tokens and more, in Gluon: tokens are the M operand (two warpgroups), tiles of up to 128 x 256.

A producer warp streams both operands through a ring by TMA; the tensor cores keep a tile's running sum (or add it to
fp32 every `PROMOTE` steps), so a step's products overlap with the wait for the next step. Results are stored through
shared memory by TMA. With ACTIVATE a tile has as many gate as up rows, loaded as two boxes, and stores only silu(gate)
* up, which saves a write and a read of both.

Programs compute whole tiles, ordered for L2 reuse: program p of G computes tiles p, p + G, p + 2G, ... If there are too
few tiles for the GPU, PARTS programs share the steps of each tile: every program passes the others their columns
through fp32 planes and finishes its own columns, so no program sums a whole tile alone. Planes are added in the order
of the parts, so results are bitwise repeatable. Sharing programs wait for each other, so all of them must be resident
at once.

From 256 tokens on the kernel is bound by loads from L2: sums of larger tiles do not fit an SM, and Triton 3.6 has no
TMA multicast on Hopper. `torch._scaled_mm` shares loads by multicast, so it computes large products.
"""

from typing import Optional

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.gluon_support import cta_barrier, gdc_launch_dependents, gdc_wait, tma_load, tma_store
from .kernel_gluon import PRODUCER_REGISTERS, multiply
from .kernel_selection import BLOCK_K, WIDE_STAGING, LinearConfig, WorkSplit
from .kernel_triton import split_buffers

GROUP = 16  # token tiles that are multiplied by all weights before the next token tiles
_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@gluon.jit
def _place(index, first_step, program, programs, steps, PARTS: gl.constexpr):
    """Return (tile, step) of a program's `index`-th unit."""
    if PARTS > 1:
        return program // PARTS, first_step + index
    wave = index // steps
    return program + wave * programs, index - wave * steps


@gluon.jit
def _corner(tile, token_tiles, weight_tiles, GROUP: gl.constexpr):
    """Return (token tile, weight tile) of a tile: GROUP token tiles with all weights, then the next ones."""
    group = tile // (GROUP * weight_tiles)
    height = gl.minimum(token_tiles - group * GROUP, GROUP)
    inside = tile - group * GROUP * weight_tiles
    return group * GROUP + inside % height, inside // height


@gluon.jit
def _load_weights(
    weight_desc, weights, ready, index, first_step, program, programs, steps, token_tiles, weight_tiles, up_row,
    BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    ACTIVATE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    slot = index % STAGES
    tile, step = _place(index, first_step, program, programs, steps, PARTS)
    _token_tile, weight_tile = _corner(tile, token_tiles, weight_tiles, GROUP)
    mbarrier.expect(ready.index(slot), (BLOCK_T + BLOCK_N) * BLOCK_K)
    if ACTIVATE:
        HALF: gl.constexpr = BLOCK_N // 2
        tma_load(
            weight_desc, [weight_tile * HALF, step * BLOCK_K], ready.index(slot), weights.index(slot).slice(0, HALF)
        )
        tma_load(
            weight_desc,
            [up_row + weight_tile * HALF, step * BLOCK_K],
            ready.index(slot),
            weights.index(slot).slice(HALF, HALF),
        )
    else:
        tma_load(weight_desc, [weight_tile * BLOCK_N, step * BLOCK_K], ready.index(slot), weights.index(slot))


@gluon.jit
def _load_tokens(
    q_desc, tokens_ring, ready, index, first_step, program, programs, steps, token_tiles, weight_tiles,
    BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    slot = index % STAGES
    tile, step = _place(index, first_step, program, programs, steps, PARTS)
    token_tile, _weight_tile = _corner(tile, token_tiles, weight_tiles, GROUP)
    tma_load(q_desc, [token_tile * BLOCK_T, step * BLOCK_K], ready.index(slot), tokens_ring.index(slot))


@gluon.jit
def _produce(
    weight_desc, q_desc, weights, tokens_ring, ready, empty, first_step, count, program, programs, steps, token_tiles,
    weight_tiles, up_row, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, ACTIVATE: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    filled = gl.minimum(count, STAGES)
    for i in range(filled):  # weights depend on no earlier kernel
        _load_weights(
            weight_desc, weights, ready, i, first_step, program, programs, steps, token_tiles, weight_tiles, up_row,
            BLOCK_T, BLOCK_N, BLOCK_K, STAGES, PARTS, ACTIVATE, GROUP,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for i in range(filled):
        _load_tokens(
            q_desc, tokens_ring, ready, i, first_step, program, programs, steps, token_tiles, weight_tiles, BLOCK_T,
            BLOCK_K, STAGES, PARTS, GROUP,
        )  # fmt: skip
    for i in range(filled, count):
        mbarrier.wait(empty.index(i % STAGES), (i // STAGES & 1) ^ 1)
        _load_weights(
            weight_desc, weights, ready, i, first_step, program, programs, steps, token_tiles, weight_tiles, up_row,
            BLOCK_T, BLOCK_N, BLOCK_K, STAGES, PARTS, ACTIVATE, GROUP,
        )  # fmt: skip
        _load_tokens(
            q_desc, tokens_ring, ready, i, first_step, program, programs, steps, token_tiles, weight_tiles, BLOCK_T,
            BLOCK_K, STAGES, PARTS, GROUP,
        )  # fmt: skip


@gluon.jit
def _halves(x, BLOCK_T: gl.constexpr, WIDTH: gl.constexpr):
    """Return the halves of a piece of `WIDTH` columns, which are in different registers of the same threads."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, WIDTH // 2, 32]
    )
    left, right = x.reshape([BLOCK_T, 2, WIDTH // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _hand_over(piece, place, part, planes, tile, SIZE: gl.constexpr, PARTS: gl.constexpr):
    """Store this part's sum of the columns that part `place` finishes."""
    if part != place:
        gl.store(planes + ((tile * PARTS + place) * PARTS + part) * SIZE, piece)


@gluon.jit
def _gather(own, part, planes, counter, tile, SIZE: gl.constexpr, PARTS: gl.constexpr):
    """Return the whole sum of this part's own columns, once all parts have stored theirs; resets the counter."""
    cta_barrier()
    gl.atomic_add(counter, 1, sem="release")
    while gl.atomic_add(counter, 0, sem="acquire") < PARTS:
        pass
    cta_barrier()
    total = gl.zeros_like(own)
    for i in gl.static_range(PARTS):
        received = gl.load(
            planes + ((tile * PARTS + part) * PARTS + i) * SIZE, mask=part != i, other=0, cache_modifier=".cg"
        )
        total += gl.where(part == i, own, received)
    if gl.atomic_add(counter, 1, sem="relaxed") == 2 * PARTS - 1:  # the last one to read them
        gl.store(counter, 0)
    return total


@gluon.jit
def _scaled(
    total, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, first_row, first_column, tokens, n, width,
    BLOCK_T: gl.constexpr, WIDTH: gl.constexpr, HAS_DELTA: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Apply scales and addends to one piece of a tile that ends before column `width`; n: row stride of the addends."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, WIDTH, 32])
    row = first_row + gl.arange(0, BLOCK_T, gl.SliceLayout(1, LAYOUT))
    column = first_column + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    token_scale = gl.load(scale_ptr + row, mask=row < tokens, other=0.0)
    row_scale = gl.load(weight_scale_ptr + column, mask=column < width, other=0.0)
    value = total.to(gl.float32) * token_scale[:, None] * row_scale[None, :]
    at = row.to(gl.int64)[:, None] * n + column[None, :]
    valid = (row < tokens)[:, None] & (column < width)[None, :]
    if HAS_DELTA:
        value += gl.load(delta_ptr + at, mask=valid, other=0.0).to(gl.float32)
    if HAS_RESIDUAL:
        value += gl.load(residual_ptr + at, mask=valid, other=0.0).to(gl.float32)
    return value


@gluon.jit
def _store(value, staging, out_desc, row, column):
    """Store one piece; the staging buffer is reused after the previous store has read it."""
    tma.store_wait(0)
    cta_barrier()
    staging.store(value.to(out_desc.dtype))
    fence_async_shared()
    cta_barrier()
    tma_store(out_desc, [row, column], staging)


@gluon.jit
def _consume(
    weights, tokens_ring, staging, ready, empty, out_desc, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr,
    planes_ptr, counters_ptr, first_step, count, program, programs, steps, token_tiles, weight_tiles, up_row, tokens, n,
    BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, PROMOTE: gl.constexpr,
    PIECES: gl.constexpr, HAS_DELTA: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ACTIVATE: gl.constexpr,
    GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run the products, exchange of sums, scales, addends or SiLU, and stores of this program's tiles (consumer warps).

    weights, tokens_ring             [STAGES, BLOCK_N, BLOCK_K] and [STAGES, BLOCK_T, BLOCK_K] e4m3 or int8: the rings
    staging, out_desc                buffers and TMA boxes of stored pieces; the result has N columns, N / 2 with
                                     ACTIVATE
    ready, empty                     barriers of a filled and of a freed stage
    scale_ptr, weight_scale_ptr      [T] and [N] fp32
    delta_ptr, residual_ptr          [T, N] addends, read with HAS_DELTA and HAS_RESIDUAL
    planes_ptr, counters_ptr         fp32 planes and int32 counters of tiles that PARTS programs share
    first_step, count                this program's first step along K, and its number of steps
    program, programs, steps         index of this program, number of programs; steps of a whole tile
    token_tiles, weight_tiles        tiles along the tokens and along N
    up_row, tokens, n                the first up row of the weights; T; N
    PARTS, PROMOTE                   programs per tile; steps after which a sum goes to fp32 (0: at the end)
    PIECES                           parts along N in which a tile is finished and stored
    ACTIVATE                         tiles have gate and up rows; silu(gate) * up is stored
    GROUP, PDL                       token tiles that are multiplied by all weights before the next; programmatic
                                     dependent launch
    """
    gl.static_assert(PARTS == 1 or PARTS == 2 or PARTS == 4)
    gl.static_assert(PIECES == PARTS or (PARTS == 1 and PIECES == 2))
    INT8: gl.constexpr = weights.dtype == gl.int8
    # Triton has no int8 instruction of 256 columns
    INSTR_N: gl.constexpr = 128 if INT8 and BLOCK_N > 128 else BLOCK_N
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, INSTR_N, 32])
    WIDTH: gl.constexpr = BLOCK_N // PIECES
    PIECE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, WIDTH, 32])
    nothing = gl.zeros([BLOCK_T, BLOCK_N], gl.int32 if INT8 else gl.float32, MMA)
    if PDL:
        gdc_wait()
    done = 0
    while done < count:
        tile, _step = _place(done, first_step, program, programs, steps, PARTS)
        stop = done + (count if PARTS > 1 else steps)
        if PROMOTE:
            total = nothing
            chunk = done
            while chunk < stop:
                chunk_end = gl.minimum(stop, chunk + PROMOTE)
                total += multiply(tokens_ring, weights, ready, empty, nothing, chunk, chunk_end, STAGES)
                chunk = chunk_end
        else:
            total = multiply(tokens_ring, weights, ready, empty, nothing, done, stop, STAGES)
        token_tile, weight_tile = _corner(tile, token_tiles, weight_tiles, GROUP)
        row = token_tile * BLOCK_T
        column = weight_tile * BLOCK_N
        if PARTS > 1:
            SIZE: gl.constexpr = BLOCK_T * WIDTH
            part = program % PARTS
            planes = (
                planes_ptr
                + gl.arange(0, BLOCK_T, gl.SliceLayout(1, PIECE))[:, None] * WIDTH
                + gl.arange(0, WIDTH, gl.SliceLayout(0, PIECE))[None, :]
            )
            left, right = _halves(total, BLOCK_T, BLOCK_N)
            if PARTS == 2:
                _hand_over(left, 0, part, planes, tile, SIZE, PARTS)
                _hand_over(right, 1, part, planes, tile, SIZE, PARTS)
                own = gl.where(part == 0, left, right)
            else:
                first, second = _halves(left, BLOCK_T, BLOCK_N // 2)
                third, fourth = _halves(right, BLOCK_T, BLOCK_N // 2)
                _hand_over(first, 0, part, planes, tile, SIZE, PARTS)
                _hand_over(second, 1, part, planes, tile, SIZE, PARTS)
                _hand_over(third, 2, part, planes, tile, SIZE, PARTS)
                _hand_over(fourth, 3, part, planes, tile, SIZE, PARTS)
                own = gl.where(part < 2, gl.where(part == 0, first, second), gl.where(part == 2, third, fourth))
            total = _gather(own, part, planes, counters_ptr + tile, tile, SIZE, PARTS)
            column += part * WIDTH
            value = _scaled(
                total, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, row, column, tokens, n, n, BLOCK_T, WIDTH,
                HAS_DELTA, HAS_RESIDUAL,
            )  # fmt: skip
            _store(value, staging, out_desc, row, column)
        elif ACTIVATE:
            left, right = _halves(total, BLOCK_T, BLOCK_N)
            column = weight_tile * WIDTH
            gate = _scaled(
                left, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, row, column, tokens, n, up_row, BLOCK_T,
                WIDTH, HAS_DELTA, HAS_RESIDUAL,
            )  # fmt: skip
            up = _scaled(
                right, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, row, up_row + column, tokens, n, n,
                BLOCK_T, WIDTH, HAS_DELTA, HAS_RESIDUAL,
            )  # fmt: skip
            _store(gate / (1.0 + gl.exp(-gate)) * up, staging, out_desc, row, column)
        elif PIECES == 2:
            left, right = _halves(total, BLOCK_T, BLOCK_N)
            value = _scaled(
                left, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, row, column, tokens, n, n, BLOCK_T, WIDTH,
                HAS_DELTA, HAS_RESIDUAL,
            )  # fmt: skip
            _store(value, staging, out_desc, row, column)
            column += WIDTH
            value = _scaled(
                right, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, row, column, tokens, n, n, BLOCK_T, WIDTH,
                HAS_DELTA, HAS_RESIDUAL,
            )  # fmt: skip
            _store(value, staging, out_desc, row, column)
        else:
            value = _scaled(
                total, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, row, column, tokens, n, n, BLOCK_T, WIDTH,
                HAS_DELTA, HAS_RESIDUAL,
            )  # fmt: skip
            _store(value, staging, out_desc, row, column)
        done = stop
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])  # one compilation for every token count of a tile
def _linear_8bit_wide(
    weight_desc, q_desc, out_desc, scale_ptr, weight_scale_ptr, delta_ptr, residual_ptr, planes_ptr, counters_ptr,
    tokens, n, k, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PROMOTE: gl.constexpr, PIECES: gl.constexpr, HAS_DELTA: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, ACTIVATE: gl.constexpr, GROUP: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = (k + BLOCK_K - 1) // BLOCK_K
    token_tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    weight_tiles = (n + BLOCK_N - 1) // BLOCK_N
    up_row = n // 2
    first_step = 0
    if PARTS > 1:
        part = program % PARTS
        first_step = part * steps // PARTS
        count = (part + 1) * steps // PARTS - first_step
    else:
        count = (token_tiles * weight_tiles - program + programs - 1) // programs * steps
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    tokens_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_T, BLOCK_K], q_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, [BLOCK_T, BLOCK_N // PIECES], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    weights,
                    tokens_ring,
                    staging,
                    ready,
                    empty,
                    out_desc,
                    scale_ptr,
                    weight_scale_ptr,
                    delta_ptr,
                    residual_ptr,
                    planes_ptr,
                    counters_ptr,
                    first_step,
                    count,
                    program,
                    programs,
                    steps,
                    token_tiles,
                    weight_tiles,
                    up_row,
                    tokens,
                    n,
                    BLOCK_T,
                    BLOCK_N,
                    STAGES,
                    PARTS,
                    PROMOTE,
                    PIECES,
                    HAS_DELTA,
                    HAS_RESIDUAL,
                    ACTIVATE,
                    GROUP,
                    PDL,
                ),
            ),
            (
                _produce,
                (
                    weight_desc,
                    q_desc,
                    weights,
                    tokens_ring,
                    ready,
                    empty,
                    first_step,
                    count,
                    program,
                    programs,
                    steps,
                    token_tiles,
                    weight_tiles,
                    up_row,
                    BLOCK_T,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    PARTS,
                    ACTIVATE,
                    GROUP,
                    PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


def launch_wide(
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
    activate: bool = False,
) -> None:
    """Run the kernel for 16-bit results; arguments as in `launch_triton`.

    q, weight and out must be 16-byte aligned, N a multiple of 8. With `activate` out [T, N / 2] = silu(left half) *
    right half; N / 2 must be a multiple of half a tile, and programs take whole tiles.
    """
    (tokens, k), n = q.shape, weight.shape[0]
    planes, counters = split_buffers(weight, config, split)
    pieces = (
        split.parts if split.split else 2 if activate else max(1, config.block_t * config.block_n * 2 // WIDE_STAGING)
    )
    out_layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, config.block_n // pieces * 2), element_bitwidth=16, rank=2
    )
    # The launch encodes the tensor maps as kernel arguments, so a captured graph has its own copies.
    weight_desc = TensorDescriptor.from_tensor(
        weight, [config.block_n // 2 if activate else config.block_n, BLOCK_K], _SWIZZLED
    )
    q_desc = TensorDescriptor.from_tensor(q, [config.block_t, BLOCK_K], _SWIZZLED)
    out_desc = TensorDescriptor.from_tensor(out, [config.block_t, config.block_n // pieces], out_layout)
    _linear_8bit_wide[split.programs,](
        weight_desc, q_desc, out_desc, scale, weight_scale, scale if delta is None else delta,
        scale if residual is None else residual, planes, counters, tokens, n, k, BLOCK_T=config.block_t,
        BLOCK_N=config.block_n, BLOCK_K=BLOCK_K, STAGES=config.stages, PARTS=split.parts,
        PROMOTE=0 if weight.dtype == torch.int8 else config.promote, PIECES=pieces, HAS_DELTA=delta is not None,
        HAS_RESIDUAL=residual is not None, ACTIVATE=activate, GROUP=GROUP, PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        PDL=pdl, num_warps=8, maxnreg=config.max_registers or None, launch_pdl=pdl,
    )  # fmt: skip
