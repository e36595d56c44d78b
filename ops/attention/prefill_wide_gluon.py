"""prefill_gluon without converters, for keys and values that `widen_kv` has converted to fp16 (Hopper, Gluon).

One warp copies steps of 128 keys and values by TMA; two groups of four warps own 64 rows each and alternate on the
tensor cores: one multiplies during the other's softmax. The shared memory of prefill_gluon's converters is used for a
third step. The arithmetic is that of prefill_gluon, so the result has the same bits.

This kernel computes the sequences that `widen_plan` selects, and rows past the end; prefill_gluon, launched after it,
computes the others.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.device import multiprocessors
from ..core.gluon_support import gdc_launch_dependents, gdc_wait, tma_load, view_shared
from .numerics import LOG2_E
from .prefill_gluon import HEAD_DIM, tile_tokens
from .prefill_gluon_softmax import consume
from .prefill_gluon_tiles import ROWS, STEP, find_tile, item_of, rounds
from .widen_kv import PLACES, WIDE_TILES

REGISTERS = (240, 24)  # per thread: of the second row group (the first has as many), of the copying warp
STAGES = 3
HOLD_QUERIES = False  # queries in registers instead of shared memory: Triton 3.9 would spill them
TURNS = True  # the groups alternate on the tensor cores


@gluon.jit
def produce(
    boxes, places, batch, keys, keys_ready, keys_free, values, values_ready, values_free, HK: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy steps (producer warp)."""
    step = 0
    items, count = rounds(batch, HK)
    for number in range(count):
        item = item_of(number)
        if item < items:
            head, sequence, _first_token, _end, _position, _length, steps, _whole, _skipped, _split = find_tile(
                item, batch, HK, TILE, True, 1
            )
            place = gl.load(places + sequence)
            for j in range(steps):
                row = ((place + steps - 1 - j) * HK + head) * (2 * STEP)
                slot = step % STAGES
                phase = (step // STAGES & 1) ^ 1
                mbarrier.wait(keys_free.index(slot), phase)
                mbarrier.expect(keys_ready.index(slot), STEP * 256)
                tma_load(boxes, [row, 0], keys_ready.index(slot), keys.index(slot))
                mbarrier.wait(values_free.index(slot), phase)
                mbarrier.expect(values_ready.index(slot), STEP * 256)
                tma_load(boxes, [row + STEP, 0], values_ready.index(slot), values.index(slot))
                step += 1


@gluon.jit(do_not_specialize=["tokens", "sequences"])
def prefill_wide_kernel(
    boxes, q, plan, context_lens, query_start, out, scale_log2, tokens, sequences, HK: gl.constexpr,
    GROUP: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, HOLD_QUERIES: gl.constexpr,
    TURNS: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """q, out [T, HK * GROUP, 128]; boxes [steps * HK * 256, 128] is a TMA descriptor of 128 x 128 fp16."""
    WIDE: gl.constexpr = boxes.layout
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(values_ready.index(i), count=1)
        mbarrier.init(keys_free.index(i), count=2)
        mbarrier.init(values_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    # queries of a tile, later its result before the store
    staged = gl.allocate_shared_memory(out.dtype.element_ty, [2, ROWS, 128], WIDE)
    queries = view_shared(staged, gl.float16, [2, ROWS, 128], WIDE)
    keys = gl.allocate_shared_memory(boxes.dtype, [STAGES, STEP, 128], WIDE)
    values = gl.allocate_shared_memory(boxes.dtype, [STAGES, STEP, 128], WIDE)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not earlier: the next kernel reads without a wait
    begins = plan + WIDE_TILES * (sequences + 1)
    idle = tokens - gl.load(query_start + sequences)  # padding rows
    tiles = gl.load(begins + sequences) + (idle + TILE - 1) // TILE
    batch = (query_start, context_lens, begins, tokens, sequences, tiles, 0)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    q,
                    out,
                    batch,
                    scale_log2,
                    queries,
                    staged,
                    keys,
                    keys,
                    keys_ready,
                    keys_free,
                    values,
                    values_ready,
                    values_free,
                    turns,
                    0,
                    HK,
                    GROUP,
                    TILE,
                    True,
                    False,
                    HOLD_QUERIES,
                    STAGES,
                    TURNS,
                ),
            ),
            (
                consume,
                (
                    q,
                    out,
                    batch,
                    scale_log2,
                    queries,
                    staged,
                    keys,
                    keys,
                    keys_ready,
                    keys_free,
                    values,
                    values_ready,
                    values_free,
                    turns,
                    1,
                    HK,
                    GROUP,
                    TILE,
                    True,
                    False,
                    HOLD_QUERIES,
                    STAGES,
                    TURNS,
                ),
            ),
            (
                produce,
                (
                    boxes,
                    plan + PLACES * (sequences + 1),
                    batch,
                    keys,
                    keys_ready,
                    keys_free,
                    values,
                    values_ready,
                    values_free,
                    HK,
                    TILE,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        REGISTERS,
    )


def launch(
    q: torch.Tensor,
    wide: torch.Tensor,
    plan: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """Fill the rows of out [T, HQ * 128] that belong to widened sequences or are padding.

    Requires `prefill_gluon.fits` for the cache.
    """
    tokens, heads, _ = q.shape
    kv_heads, sequences = wide.shape[1], context_lens.shape[0]
    tile = tile_tokens(heads, kv_heads)
    tiles = tokens // tile + sequences + 1
    prefill_wide_kernel[min(tiles * kv_heads, multiprocessors(q.device)),](
        descriptor(wide), q, plan, context_lens, query_start, out, softmax_scale * LOG2_E, tokens, sequences,
        HK=kv_heads, GROUP=heads // kv_heads, TILE=tile,
        STAGES=STAGES, HOLD_QUERIES=HOLD_QUERIES, TURNS=TURNS, REGISTERS=REGISTERS, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip


def descriptor(wide: torch.Tensor) -> Any:
    """Return a TMA descriptor of the keys or values of a step and kv head: 128 tokens, 256 bytes."""
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(wide.view(-1, HEAD_DIM), [int(STEP), HEAD_DIM], swizzled)
