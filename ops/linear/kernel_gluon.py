"""linear_8bit in Gluon for decode steps: a producer warp streams both operands through a TMA ring, others multiply.

Work is divided as in `kernel_triton.py`. The ring continues across tiles, so the next tile is loaded during the
epilogue. Weights do not depend on earlier kernels: under PDL the producer fills the whole ring with them before its
wait, and only loads of activations follow. TMA fills columns and rows beyond N, K and the tokens with zeros.

If activations have a scale per token and 128 columns (`quantize_blocks`), a step's scales are loaded through the ring
too, and its product is scaled and added in fp32 before the next one starts.
"""

from typing import Optional

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.gluon_support import cta_barrier, gdc_launch_dependents, gdc_wait, tma_load
from .kernel_selection import BLOCK_K, LinearConfig, WorkSplit
from .kernel_triton import split_buffers

PRODUCER_REGISTERS = 40
LEAST_BOX = 32  # minimum scales of a TMA box, which is aligned to 128 bytes in shared memory
_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def _first_unit(program, programs, tiles, steps, SPLIT: gl.constexpr):
    if SPLIT:
        return program * (tiles * steps) // programs
    return program * tiles // programs * steps


@gluon.jit
def _load_weights(
    weight_desc, weights, ready, slot, unit, steps, token_tiles, BYTES: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(ready.index(slot), BYTES)
    tma_load(
        weight_desc,
        [unit // steps // token_tiles * BLOCK_N, unit % steps * BLOCK_K],
        ready.index(slot),
        weights.index(slot),
    )


@gluon.jit
def _load_tokens(
    q_desc, scale_desc, tokens_ring, scales, ready, slot, unit, steps, token_tiles, BLOCK_T: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_SCALES: gl.constexpr,
):  # fmt: skip
    tma_load(
        q_desc,
        [unit // steps % token_tiles * BLOCK_T, unit % steps * BLOCK_K],
        ready.index(slot),
        tokens_ring.index(slot),
    )
    if BLOCK_SCALES:
        tma_load(
            scale_desc, [unit % steps, unit // steps % token_tiles * BLOCK_T], ready.index(slot), scales.index(slot)
        )


@gluon.jit
def _produce(
    weight_desc, q_desc, scale_desc, weights, tokens_ring, scales, ready, empty, begin, end, steps, token_tiles,
    BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SCALE_BOX: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = (BLOCK_N + BLOCK_T) * BLOCK_K + SCALE_BOX * 4
    filled = gl.minimum(end - begin, STAGES)
    for i in range(filled):
        _load_weights(weight_desc, weights, ready, i, begin + i, steps, token_tiles, BYTES, BLOCK_N, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for i in range(filled):
        _load_tokens(
            q_desc, scale_desc, tokens_ring, scales, ready, i, begin + i, steps, token_tiles, BLOCK_T, BLOCK_K,
            SCALE_BOX > 0,
        )  # fmt: skip
    for i in range(filled, end - begin):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        _load_weights(weight_desc, weights, ready, slot, begin + i, steps, token_tiles, BYTES, BLOCK_N, BLOCK_K)
        _load_tokens(
            q_desc, scale_desc, tokens_ring, scales, ready, slot, begin + i, steps, token_tiles, BLOCK_T, BLOCK_K,
            SCALE_BOX > 0,
        )  # fmt: skip


@gluon.jit
def multiply(wide, narrow, ready, empty, acc, begin, end, STAGES: gl.constexpr):
    """Return the product of the ring's units begin..end, summed by the tensor cores.

    A unit's slot is freed while the next unit's product runs.
    """
    for i in range(begin, end):
        slot = i % STAGES
        mbarrier.wait(ready.index(slot), i // STAGES & 1)
        acc = warpgroup_mma(wide.index(slot), narrow.index(slot).permute((1, 0)), acc, use_acc=i > begin, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > begin)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((end - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _consume(
    weights, tokens_ring, ready, empty, scales, weight_scale_ptr, delta_ptr, residual_ptr, out_ptr, planes_ptr,
    counters_ptr, begin, end, steps, token_tiles, tiles, program, programs, tokens, n, BLOCK_N: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, PARTS: gl.constexpr, BLOCK_SCALES: gl.constexpr,
    HAS_DELTA: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Run the products, sums across programs, scales, addends and stores of this program's tiles (consumer warps).

    weights, tokens_ring          [STAGES, BLOCK_N, BLOCK_K] and [STAGES, BLOCK_T, BLOCK_K] e4m3 or int8: the rings
    ready, empty                  barriers of a filled and of a freed stage
    scales                        with BLOCK_SCALES the ring of a step's scales, else a pointer [T] fp32
    weight_scale_ptr              [N] fp32
    delta_ptr, residual_ptr       [T, N] addends, read with HAS_DELTA and HAS_RESIDUAL
    out_ptr                       [T, N]
    planes_ptr, counters_ptr      two planes [BLOCK_T, BLOCK_N] per program (fp32, or int32 for int8), and a counter per
                                  tile (int32), zero between launches: for tiles that programs share
    begin, end, steps             this program's units, a unit being one step along K of a tile; steps per tile
    token_tiles, tiles            tiles along the tokens; all tiles
    program, programs, tokens, n  index of this program, number of programs; T; N
    SPLIT, PARTS                  division of the units (`_first_unit`); the most programs per tile
    WARPS, PDL                    consumer warps; programmatic dependent launch
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_T, 32]
    )
    # 8 adjacent outputs of a token per thread
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, WARPS], [0, 1])
    if PDL:
        gdc_wait()
    offsets_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORE))
    offsets_t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, STORE))
    INT8: gl.constexpr = weights.dtype == gl.int8
    nothing = gl.zeros([BLOCK_N, BLOCK_T], gl.int32 if INT8 else gl.float32, MMA)
    unit = begin
    while unit < end:
        tile = unit // steps
        stop = gl.minimum(end, (tile + 1) * steps)
        if INT8 and not BLOCK_SCALES:
            acc = multiply(weights, tokens_ring, ready, empty, nothing, unit - begin, stop - begin, STAGES)
        else:
            acc = gl.zeros([BLOCK_N, BLOCK_T], gl.float32, MMA)
            for i in range(unit - begin, stop - begin):
                slot = i % STAGES
                mbarrier.wait(ready.index(slot), i // STAGES & 1)
                product = warpgroup_mma(
                    weights.index(slot), tokens_ring.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
                )
                if BLOCK_SCALES:
                    token_scale = scales.index(slot).slice(0, BLOCK_T, dim=1).load(MMA)
                product = warpgroup_mma_wait(0, deps=(product,))
                if BLOCK_SCALES:
                    fence_async_shared()  # scales have been read: a barrier does not complete loads
                mbarrier.arrive(empty.index(slot), count=1)
                if BLOCK_SCALES:
                    acc += product.to(gl.float32) * token_scale
                else:
                    acc += product  # the tensor cores' own running sum has 14 bits: add blocks of K in true fp32
        rows = tile // token_tiles * BLOCK_N + offsets_n
        columns = tile % token_tiles * BLOCK_T + offsets_t
        total = gl.convert_layout(acc, STORE)
        complete = stop - unit == steps
        if PARTS > 1:  # noqa: SIM102  a constant: if no tile is shared nothing below is compiled
            if not complete:
                # A program has at most two shared tiles: plane 0 for its first tile, plane 1 for its last one.
                SIZE: gl.constexpr = BLOCK_N * BLOCK_T
                inside = (columns < tokens)[None, :]
                planes = planes_ptr + offsets_t[None, :] * BLOCK_N + offsets_n[:, None]
                own = 2 * program + gl.where(begin < tile * steps, 1, 0)
                gl.store(planes + own * SIZE, total, mask=inside)
                cta_barrier()
                # the programs with the tile's first and last unit
                first = ((tile * steps + 1) * programs - 1) // (tiles * steps)
                last = ((tile + 1) * steps * programs - 1) // (tiles * steps)
                complete = gl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == last - first
                if complete:
                    begins_before = _first_unit(first, programs, tiles, steps, SPLIT) < tile * steps
                    total = gl.load(
                        planes + (2 * first + gl.where(begins_before, 1, 0)) * SIZE,
                        mask=inside,
                        other=0,
                        cache_modifier=".cg",
                    )
                    for part in gl.static_range(1, PARTS):
                        held = (columns < gl.where(first + part <= last, tokens, 0))[None, :]
                        total += gl.load(planes + 2 * (first + part) * SIZE, mask=held, other=0, cache_modifier=".cg")
                    gl.store(counters_ptr + tile, 0)  # reset for the next launch
        if complete:
            row_scale = gl.load(weight_scale_ptr + rows, mask=rows < n, other=0.0)
            if BLOCK_SCALES:
                value = total * row_scale[:, None]
            else:
                row_token_scale = gl.load(scales + columns, mask=columns < tokens, other=0.0)
                value = total.to(gl.float32) * row_token_scale[None, :] * row_scale[:, None]
            offsets = columns.to(gl.int64)[None, :] * n + rows[:, None]
            valid = (rows < n)[:, None] & (columns < tokens)[None, :]
            if HAS_DELTA:
                value += gl.load(delta_ptr + offsets, mask=valid, other=0.0).to(gl.float32)
            if HAS_RESIDUAL:
                value += gl.load(residual_ptr + offsets, mask=valid, other=0.0).to(gl.float32)
            gl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=valid)
        unit = stop


@gluon.jit(do_not_specialize=["tokens"])  # one compilation for every token count of a tile
def _linear_8bit_tma(
    weight_desc, q_desc, scale, weight_scale_ptr, delta_ptr, residual_ptr, out_ptr, planes_ptr, counters_ptr, tokens, n,
    k, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    PARTS: gl.constexpr, SCALE_BOX: gl.constexpr, HAS_DELTA: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Run one program of the launch.

    `scale`: a pointer to the tokens' scales, or TMA boxes of a step's SCALE_BOX (>= BLOCK_T) scales of a token tile.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = (k + BLOCK_K - 1) // BLOCK_K
    token_tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    tiles = (n + BLOCK_N - 1) // BLOCK_N * token_tiles
    begin = _first_unit(program, programs, tiles, steps, SPLIT)
    end = _first_unit(program + 1, programs, tiles, steps, SPLIT)
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    tokens_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_T, BLOCK_K], q_desc.layout)
    if SCALE_BOX == 0:
        scale_desc: gl.constexpr = None
        scale_ring: gl.constexpr = None
        scales = scale
    else:
        scale_desc = scale
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SCALE_BOX], scale.layout)
        scales = scale_ring
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
                    ready,
                    empty,
                    scales,
                    weight_scale_ptr,
                    delta_ptr,
                    residual_ptr,
                    out_ptr,
                    planes_ptr,
                    counters_ptr,
                    begin,
                    end,
                    steps,
                    token_tiles,
                    tiles,
                    program,
                    programs,
                    tokens,
                    n,
                    BLOCK_N,
                    BLOCK_T,
                    STAGES,
                    SPLIT,
                    PARTS,
                    SCALE_BOX > 0,
                    HAS_DELTA,
                    HAS_RESIDUAL,
                    PDL,
                    num_warps,
                ),
            ),
            (
                _produce,
                (
                    weight_desc,
                    q_desc,
                    scale_desc,
                    weights,
                    tokens_ring,
                    scale_ring,
                    ready,
                    empty,
                    begin,
                    end,
                    steps,
                    token_tiles,
                    BLOCK_N,
                    BLOCK_T,
                    BLOCK_K,
                    STAGES,
                    SCALE_BOX,
                    PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


def launch_gluon(
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
    """Run the kernel; arguments as in `launch_triton`, with q, weight and block scales 16-byte aligned, P % 4 == 0."""
    (tokens, k), n = q.shape, weight.shape[0]
    scale_box = max(LEAST_BOX, config.block_t) if scale.dim() == 2 else 0
    planes, counters = split_buffers(weight, config, split, scale_box > 0)
    # The launch encodes the tensor maps as kernel arguments, so a captured graph has its own copies.
    weight_desc = TensorDescriptor.from_tensor(weight, [config.block_n, BLOCK_K], _SWIZZLED)
    q_desc = TensorDescriptor.from_tensor(q, [config.block_t, BLOCK_K], _SWIZZLED)
    scales = TensorDescriptor.from_tensor(scale, [1, scale_box], _PLAIN) if scale_box else scale
    _linear_8bit_tma[split.programs,](
        weight_desc, q_desc, scales, weight_scale, scale if delta is None else delta,
        scale if residual is None else residual, out, planes, counters, tokens, n, k, BLOCK_N=config.block_n,
        BLOCK_T=config.block_t, BLOCK_K=BLOCK_K, STAGES=config.stages, SPLIT=split.split, PARTS=split.parts,
        SCALE_BOX=scale_box, HAS_DELTA=delta is not None, HAS_RESIDUAL=residual is not None,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS, PDL=pdl, num_warps=config.warps, maxnreg=config.max_registers or None,
        launch_pdl=pdl,
    )  # fmt: skip
