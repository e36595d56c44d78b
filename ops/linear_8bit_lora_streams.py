"""The warp that brings data in `linear_8bit_lora_gluon.py`: one ring for weights and activations, and for the adapters' rows behind them."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .attention_gluon_pieces import view_shared
from .linear_8bit_gluon import gdc_launch_dependents, gdc_wait, tma_load
from .linear_8bit_wide import _corner

GROUP_RANKS = gl.constexpr(128)  # of a ring slot: four adapters of rank 32, two of rank 64


@gluon.constexpr_function
def row_layout(RANK):
    """Boxes of B as they land and as the tensor cores read them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=RANK, element_bitwidth=8, rank=2)


@gluon.jit
def count_items(active, stride, token_tiles):
    """How many adapters all token tiles have."""
    items = gl.load(active)
    for tile in range(1, token_tiles):
        items += gl.load(active + tile * stride)
    return items


@gluon.jit
def find_item(active, stride, item):
    """(token tile, place in its list, slot of the adapter) of an item: tile by tile, each tile's adapters in the order of its list."""
    tile = 0
    listed = gl.load(active)
    while item >= listed:
        item -= listed
        tile += 1
        listed = gl.load(active + tile * stride)
    return tile, item, gl.load(active + tile * stride + 1 + item)


@gluon.jit
def _claim(empty, unit, STAGES: gl.constexpr):
    mbarrier.wait(empty.index(unit % STAGES), (unit // STAGES & 1) ^ 1)  # a new barrier's phase before the first counts as over
    return unit % STAGES


@gluon.jit
def _load_weights(boxes, shared, slot, wave, weight_tile, weight_tiles, step, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr):
    """A step's gate and up rows; with a tile's first ones come the scales of all of them."""
    weights, _tokens_ring, scales, ready = shared[0], shared[1], shared[2], shared[4]
    mbarrier.expect(ready.index(slot), (BLOCK_T + 256) * BLOCK_K, pred=step > 0)
    mbarrier.expect(ready.index(slot), (BLOCK_T + 256) * BLOCK_K + 1024, pred=step == 0)
    for half in gl.static_range(2):
        tile = half * weight_tiles + weight_tile
        tma_load(boxes[0], [tile * 128, step * BLOCK_K], ready.index(slot), weights.index(slot).slice(half * 128, 128))
        if step == 0:
            tma_load(boxes[2], [tile, 0], ready.index(slot), scales.index(wave % 2 * 2 + half))


@gluon.jit
def _load_group(boxes, shared, slot, listed, first, count, weight_tile, weight_tiles, RANK: gl.constexpr):
    """The rows of B of as many adapters of a list as a slot holds, from its entry `first` on: gates, then ups of each."""
    PER: gl.constexpr = GROUP_RANKS // RANK
    weights, ready = shared[0], shared[4]
    rows = view_shared(weights.index(slot), weights.dtype, [256 // RANK, 128, RANK], row_layout(RANK))
    present = gl.minimum(count - first, PER)
    for each in gl.static_range(1, PER + 1):
        mbarrier.expect(ready.index(slot), each * (256 * RANK), pred=present == each)
    for each in gl.static_range(PER):
        if each < present:
            adapter = gl.load(listed + 1 + first + each)
            for half in gl.static_range(2):
                tma_load(boxes[4], [((adapter * 2 + half) * weight_tiles + weight_tile) * 128, 0], ready.index(slot), rows.index(2 * each + half))


@gluon.jit
def _produce_tiles(boxes, shared, memory, sizes, RANK: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
                   GROUP: gl.constexpr, PDL: gl.constexpr):
    PER: gl.constexpr = GROUP_RANKS // RANK
    tokens_ring, ready, empty = shared[1], shared[4], shared[5]
    active = memory[4]
    program, multiplying, waves, steps, token_tiles, weight_tiles, _tokens, stride = sizes
    token_tile, weight_tile = _corner(program, token_tiles, weight_tiles, GROUP)
    filled = gl.minimum(steps, STAGES)
    for unit in range(filled):  # weights depend on no earlier kernel
        _load_weights(boxes, shared, unit, 0, weight_tile, weight_tiles, unit, BLOCK_T, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for unit in range(filled):
        tma_load(boxes[1], [token_tile * BLOCK_T, unit * BLOCK_K], ready.index(unit), tokens_ring.index(unit))
    unit = filled
    begin = filled
    for wave in range(waves):
        token_tile, weight_tile = _corner(program + wave * multiplying, token_tiles, weight_tiles, GROUP)
        listed = active + token_tile * stride
        count = gl.load(listed)
        for step in range(begin, steps):
            slot = _claim(empty, unit, STAGES)
            _load_weights(boxes, shared, slot, wave, weight_tile, weight_tiles, step, BLOCK_T, BLOCK_K)
            tma_load(boxes[1], [token_tile * BLOCK_T, step * BLOCK_K], ready.index(slot), tokens_ring.index(slot))
            unit += 1
        for first in range(0, count, PER):
            _load_group(boxes, shared, _claim(empty, unit, STAGES), listed, first, count, weight_tile, weight_tiles, RANK)
            unit += 1
        begin = 0


@gluon.jit
def _produce_items(boxes, shared, memory, sizes, shrinking, RANK: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
                   PDL: gl.constexpr):
    weights, tokens_ring, ready, empty = shared[0], shared[1], shared[4], shared[5]
    active = memory[4]
    program, multiplying, _waves, steps, token_tiles, _weight_tiles, _tokens, stride = sizes
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    unit = 0
    for item in range(program - multiplying, count_items(active, stride, token_tiles), shrinking):
        token_tile, _entry, adapter = find_item(active, stride, item)
        for step in range(steps):
            slot = _claim(empty, unit, STAGES)
            mbarrier.expect(ready.index(slot), (BLOCK_T + 2 * RANK) * BLOCK_K)
            tma_load(boxes[3], [adapter * (2 * RANK), step * BLOCK_K], ready.index(slot), weights.index(slot).slice(0, 2 * RANK))
            tma_load(boxes[1], [token_tile * BLOCK_T, step * BLOCK_K], ready.index(slot), tokens_ring.index(slot))
            unit += 1


@gluon.jit
def produce(boxes, shared, memory, sizes, shrinking, RANK: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
             GROUP: gl.constexpr, PDL: gl.constexpr):
    if sizes[0] < sizes[1]:
        _produce_tiles(boxes, shared, memory, sizes, RANK, BLOCK_T, BLOCK_K, STAGES, GROUP, PDL)
    else:
        _produce_items(boxes, shared, memory, sizes, shrinking, RANK, BLOCK_T, BLOCK_K, STAGES, PDL)
