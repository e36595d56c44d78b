"""Items of prefill_gluon and prefill_wide_gluon: tiles of 128 rows of one sequence and KV head, or splits of tiles.

A short chunk after a long context has few tiles, and a program would read the whole context for each. With SPLIT the
steps of a tile that is longer than a program's share of the work are divided among several programs. Lengths are known
on the device only, so each program computes the number of splits from the same lengths (`plan_splits`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # per group of four warps; a tile has two groups
STEP = gl.constexpr(128)  # keys per step: two pages
SEARCHED = gl.constexpr(64)  # sequences that `find_tile` searches at a time
COUNTED = gl.constexpr(256)  # the same with SPLIT, which reads more of each sequence
# values of SPLIT
SPLIT_TILES = gl.constexpr(1)  # items are splits of tiles
PREFIXES = gl.constexpr(2)  # items are parts of the prefixes of `prefix_plan`
PART_STEPS = gl.constexpr(2)  # minimum steps of a part


@gluon.jit
def rounds(batch, HK: gl.constexpr):
    """Return (number of items, number of rounds: the maximum of items per program)."""
    items = batch[5] * HK
    return items, (items + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def item_of(number):
    """Return a program's item of round `number`.

    Every other round is reversed, so that a program with a long item gets a short one in the next round.
    """
    program = gl.program_id(0)
    return number * gl.num_programs(0) + gl.where(number % 2 == 0, program, gl.num_programs(0) - 1 - program)


@gluon.jit
def find_tile(
    item, batch, HK: gl.constexpr, TILE: gl.constexpr, PLANNED: gl.constexpr, WARPS: gl.constexpr,
    WINDOW: gl.constexpr = 0, SPLIT: gl.constexpr = 0,
):  # fmt: skip
    """Return an item's (kv head, sequence, first token, end of its tokens, position, length, steps, whole, skipped,
    split).

    An item with first >= end has no tokens. Every row sees the keys of the first `whole` steps, unless they are older
    than WINDOW. The item does not read the first `skipped` steps; position (of the first token), length, steps and
    whole count from there. Sequences are searched in a loop, so that one compilation supports any number of them.
    PLANNED: `begins`, a row of `widen_plan`, is the number of tiles before each sequence; otherwise every partial tile
    at the end of a sequence has an item of its own. SPLIT: an item is a split of a tile (`find_split`), or a part of a
    prefix (`find_prefix`).
    """
    if SPLIT == PREFIXES:
        return find_prefix(item, batch, HK, TILE)
    elif SPLIT == SPLIT_TILES:
        return find_split(item, batch, HK, TILE, PLANNED, WARPS)
    else:
        return find_whole(item, batch, HK, TILE, PLANNED, WARPS, WINDOW)


@gluon.jit
def steps_per_part(steps, parts):
    """Return the steps of each part of a prefix; the last parts may have fewer, or none."""
    return gl.maximum((steps + parts - 1) // parts, PART_STEPS)


@gluon.jit
def find_prefix(item, batch, HK: gl.constexpr, TILE: gl.constexpr):
    """Return a part of a prefix as `find_tile` does; its tokens are those of the tile's sequences, one per sequence.

    The sequence is the one whose block table is read; split is (part, 0, 1).
    """
    _starts, _lengths, plan, _tokens, sequences, _items, parts = batch
    number = item // HK // parts
    part = item // HK % parts
    pages = gl.load(plan + sequences + number)
    owner = gl.load(plan + 2 * sequences + number)
    share = steps_per_part(pages // 2, parts)
    skipped = part * share
    steps = gl.minimum(gl.maximum(pages // 2 - skipped, 0), share)
    first_token = number * TILE
    end = gl.where(steps > 0, gl.minimum(first_token + TILE, sequences), first_token)
    return item % HK, owner, first_token, end, steps * STEP, steps * STEP, steps, steps, skipped, (part, 0, 1)


@gluon.jit
def find_whole(
    item, batch, HK: gl.constexpr, TILE: gl.constexpr, PLANNED: gl.constexpr, WARPS: gl.constexpr, WINDOW: gl.constexpr
):
    """Return an item of `find_tile` without SPLIT."""
    query_start, context_lens, begins, tokens, sequences, tiles, _chunk = batch
    head = item % HK
    tile = tiles - 1 - item // HK
    LAYOUT: gl.constexpr = gl.BlockedLayout([SEARCHED // 32], [32], [WARPS], [0])
    place = gl.arange(0, SEARCHED, LAYOUT)
    begins_before = gl.zeros([SEARCHED], gl.int32, LAYOUT)
    for searched in range(0, sequences + 1, SEARCHED):
        index = searched + place
        if PLANNED:
            begin = gl.load(begins + index, mask=index <= sequences, other=0)
        else:
            begin = gl.load(query_start + index, mask=index <= sequences, other=0) // TILE + index
        begins_before += ((begin <= tile) & (index <= sequences)).to(gl.int32)
    sequence = gl.sum(begins_before, 0) - 1
    is_real = sequence < sequences
    start = gl.load(query_start + sequence)
    end = gl.load(query_start + sequence + 1, mask=is_real, other=tokens)
    length = gl.load(context_lens + sequence, mask=is_real, other=0)
    first_tile = gl.load(begins + sequence) if PLANNED else start // TILE + sequence
    first_token = start + (tile - first_tile) * TILE
    position = length - end + first_token
    skipped = 0
    if WINDOW:
        skipped = gl.maximum(position - WINDOW + 1, 0) // STEP
        position -= skipped * STEP
        length -= skipped * STEP
    seen = gl.minimum(length, gl.maximum(position + TILE, 0))
    steps = (seen + STEP - 1) // STEP
    whole = gl.minimum(gl.maximum(position + 1, 0), length) // STEP
    return (
        head,
        sequence,
        first_token,
        end,
        position,
        length,
        gl.where(first_token < end, steps, 0),
        whole,
        skipped,
        (0, 0, 1),
    )


@gluon.jit
def add(a, b):
    """Return a + b, for scans."""
    return a + b


@gluon.jit
def count_tiles(index, batch, TILE: gl.constexpr, PLANNED: gl.constexpr):
    """Return (tiles, steps of the last tile) of the sequences `index`; rows past the end are one more sequence."""
    query_start, context_lens, plan, tokens, sequences = batch
    is_real = index < sequences
    start = gl.load(query_start + index, mask=index <= sequences, other=0)
    end = gl.load(query_start + index + 1, mask=is_real, other=0)
    end = gl.where(is_real, end, tokens)
    tiles = gl.where(index <= sequences, (end - start + TILE - 1) // TILE, 0)
    if PLANNED:  # prefill_wide_gluon computes widened sequences and rows past the end
        place = gl.load(plan + index, mask=is_real, other=0)
        tiles = gl.where(place < 0, tiles, 0)
    return tiles, (gl.load(context_lens + index, mask=is_real, other=0) + STEP - 1) // STEP


@gluon.jit
def plan_splits(batch, min_steps, HK: gl.constexpr, TILE: gl.constexpr, PLANNED: gl.constexpr, WARPS: gl.constexpr):
    """Return (number of items per KV head, maximum steps of a split) for `count_tiles`' batch.

    With tiles for at most half of the programs, every program gets at most one item. With more, only tiles of more than
    two programs' average work are split. In both cases there are at most as many splits of split tiles as programs:
    the sum of ceil(steps / chunk) is less than that of steps / chunk, at most `budget`, plus the number of split tiles.
    This is at most the number of all tiles; with more than half as many tiles as programs it is at most `budget`, since
    each split tile has more than `chunk` steps.
    """
    place = gl.arange(0, COUNTED, gl.BlockedLayout([COUNTED // 32], [32], [WARPS], [0]))
    tiles = gl.zeros_like(place)
    work = gl.zeros_like(place)
    for first in range(0, batch[4] + 1, COUNTED):
        own, steps = count_tiles(first + place, batch, TILE, PLANNED)
        tiles += own
        work += own * steps
    programs = gl.num_programs(0)
    budget = gl.maximum(programs - gl.sum(tiles, 0) * HK, programs // 2)
    chunk = gl.maximum((gl.sum(work, 0) * HK + budget - 1) // budget, min_steps)
    items = gl.zeros_like(place)
    for first in range(0, batch[4] + 1, COUNTED):
        own, steps = count_tiles(first + place, batch, TILE, PLANNED)
        items += own * gl.maximum((steps + chunk - 1) // chunk, 1)
    return gl.sum(items, 0), chunk


@gluon.jit
def find_split(item, batch, HK: gl.constexpr, TILE: gl.constexpr, PLANNED: gl.constexpr, WARPS: gl.constexpr):
    """Return an item as `find_tile` does; its split is (index among all splits of split tiles, split, splits).

    The index is that of the tile's first split. A tile is split into fewer parts than its sequence's last tile if it
    has fewer steps; items of the remaining parts have no tokens.
    """
    query_start, context_lens, plan, tokens, sequences, items, chunk = batch
    head = item % HK
    unit = items - 1 - item // HK
    place = gl.arange(0, COUNTED, gl.BlockedLayout([COUNTED // 32], [32], [WARPS], [0]))
    sequence = 0
    begin = 0
    splits_before = 0
    counted = 0
    for first in range(0, sequences + 1, COUNTED):
        index = first + place
        tiles, steps = count_tiles(index, (query_start, context_lens, plan, tokens, sequences), TILE, PLANNED)
        parts = gl.maximum((steps + chunk - 1) // chunk, 1)
        own = tiles * parts
        is_before = (gl.associative_scan(own, 0, add) + counted <= unit) & (index <= sequences)
        sequence += gl.sum(is_before.to(gl.int32), 0)
        begin += gl.sum(gl.where(is_before, own, 0), 0)
        splits_before += gl.sum(gl.where(is_before & (parts > 1), own, 0), 0)
        counted += gl.sum(own, 0)
    is_real = sequence < sequences
    start = gl.load(query_start + sequence)
    end = gl.load(query_start + sequence + 1, mask=is_real, other=tokens)
    length = gl.load(context_lens + sequence, mask=is_real, other=0)
    parts = gl.maximum(((length + STEP - 1) // STEP + chunk - 1) // chunk, 1)
    tile = (unit - begin) // parts
    split = (unit - begin) % parts
    first_token = start + tile * TILE
    position = length - end + first_token
    seen = gl.minimum(length, gl.maximum(position + TILE, 0))
    steps = (seen + STEP - 1) // STEP
    whole = gl.minimum(gl.maximum(position + 1, 0), length) // STEP
    share = gl.maximum((steps + parts - 1) // parts, 1)
    splits = gl.maximum((steps + share - 1) // share, 1)
    skipped = gl.minimum(split, splits - 1) * share
    end = gl.where(split < splits, end, first_token)
    steps = gl.where(split < splits, gl.minimum(steps - skipped, share), 0)
    position -= skipped * STEP
    length -= skipped * STEP
    whole = gl.maximum(whole - skipped, 0)
    return (
        head, sequence, first_token, end, position, length, steps, whole, skipped,
        (splits_before + tile * parts, split, splits),
    )  # fmt: skip
