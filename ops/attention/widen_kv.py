"""Convert pages of an int8 KV cache to fp16 once, for an attention that reads them many times.

Attention with many queries multiplies each key and value many times in fp16. For sequences with enough queries
`widen_kv` converts the cache once; for the others, decode rows included, each tile converts the pages that it reads.
`widen_plan` selects the sequences once per step for all layers. It runs on the GPU, since the host does not have the
lengths.

The converted values have the same bits as in prefill_gluon: value * min(16 * scale, limit), where the limit keeps the
product within fp16's range; the factor and the product are rounded to fp16.
"""

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors
from ..core.dtypes import QUANTIZED_MAX
from ..core.kv_layout import PAGE_SIZE
from ..core.registry import register
from ..core.triton_support import INTERP, cdiv, next_power_of_2, pdl_options, pdl_start, require_contiguous

STEP_TOKENS = 128  # two pages: one step of attention
# Sequences with fewer query tiles stay int8: writing and reading fp16 takes about as long as four tiles save.
FEWEST_TILES = 4
PLANNED_SEQUENCES = 512  # minimum of compiled sequences, so that one compilation supports every step of an engine
PLACES, WIDE_TILES, NARROW_TILES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # rows of the plan


def widen_plan_reference(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    tile: int,
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select sequences of at least four tiles of `tile` queries, in order, up to `steps` steps of 128 tokens.

    block_table [B, P], context_lens [B], query_start [B + 1]: int32, as in `paged_attention`.
    Returns (plan, pages), int32.
    plan [3, B + 1]   per sequence: its first step among the widened ones (-1: not widened), tiles of the widened ones
                      before it, and of the others; the last column holds the totals
    pages [steps, 2]  cache pages of each step, in order; the last page of an odd number twice; -1 after the last step
    """
    starts, contexts = query_start.tolist(), context_lens.tolist()
    rows: list[list[int]] = [[], [], []]
    listed: list[int] = []
    wanted = used = wide_tiles = narrow_tiles = 0
    for sequence, context in enumerate(contexts):
        count, place, length = starts[sequence + 1] - starts[sequence], wanted, cdiv(context, STEP_TOKENS)
        enough = count >= FEWEST_TILES * tile
        wanted += length * enough
        widened = enough and wanted <= steps
        for row, value in zip(rows, (place if widened else -1, wide_tiles, narrow_tiles), strict=True):
            row.append(value)
        tiles = cdiv(count, tile)
        wide_tiles, narrow_tiles = wide_tiles + tiles * widened, narrow_tiles + tiles * (not widened)
        if widened:
            used = wanted
            last = cdiv(context, PAGE_SIZE) - 1
            listed += [int(block_table[sequence, min(block, last)]) for block in range(2 * length)]
    for row, value in zip(rows, (used, wide_tiles, narrow_tiles), strict=True):
        row.append(value)
    listed += [-1] * (2 * steps - len(listed))
    device = block_table.device
    return torch.tensor(rows, dtype=torch.int32, device=device), torch.tensor(
        listed, dtype=torch.int32, device=device
    ).view(steps, 2)


def widen_plan_fake(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    tile: int,
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    return block_table.new_empty((3, block_table.shape[0] + 1)), block_table.new_empty((steps, 2))


@triton.jit(do_not_specialize=["sequences", "num_blocks", "steps"])
def _plan_kernel(
    block_table, context_lens, query_start, plan, pages, sequences, num_blocks, steps, TILE: tl.constexpr,
    FEWEST: tl.constexpr, SEQUENCES: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program b lists the pages of sequence b; program B writes the plan, and -1 after the last page."""
    pdl_start(PDL)
    own = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    real = index < sequences
    start = tl.load(query_start + index, mask=real, other=0)
    count = tl.load(query_start + index + 1, mask=real, other=0) - start
    context = tl.load(context_lens + index, mask=real, other=0)
    enough = (count >= FEWEST * TILE) & real
    length = tl.where(enough, (context + STEP - 1) // STEP, 0)
    end = tl.cumsum(length, 0)
    widened = enough & (end <= steps)
    used = tl.max(tl.where(widened, end, 0), 0)
    if own == sequences:
        tiles = tl.where(real, (count + TILE - 1) // TILE, 0)
        wide = tl.where(widened, tiles, 0)
        narrow = tiles - wide
        row = sequences + 1
        there = index <= sequences
        tl.store(plan + index, tl.where(real, tl.where(widened, end - length, -1), used), mask=there)
        tl.store(plan + row + index, tl.cumsum(wide, 0) - wide, mask=there)
        tl.store(plan + 2 * row + index, tl.cumsum(narrow, 0) - narrow, mask=there)
        entry = tl.arange(0, CHUNK)
        for first in range(2 * used, 2 * steps, CHUNK):
            tl.store(pages + first + entry, tl.full([CHUNK], -1, tl.int32), mask=first + entry < 2 * steps)
    else:
        here = index == own
        if tl.sum(tl.where(here & widened, 1, 0), 0) > 0:
            place = 2 * tl.sum(tl.where(here, end - length, 0), 0)
            entries = 2 * tl.sum(tl.where(here, length, 0), 0)
            last = (tl.sum(tl.where(here, context, 0), 0) + PAGE - 1) // PAGE - 1
            block = tl.arange(0, CHUNK)
            for first in range(0, entries, CHUNK):
                inside = first + block < entries
                page = tl.load(
                    block_table + own.to(tl.int64) * num_blocks + tl.minimum(first + block, last), mask=inside, other=0
                )
                tl.store(pages + place + first + block, page, mask=inside)


def widen_plan_launch(
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    tile: int,
    steps: int,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (plan, pages) by one program per sequence and one for the plan. Ignores `sm_budget`."""
    plan, pages = out
    require_contiguous("widen_plan", block_table=block_table, context_lens=context_lens, query_start=query_start)
    sequences, num_blocks = block_table.shape
    _plan_kernel[(sequences + 1,)](
        block_table, context_lens, query_start, plan, pages, sequences, num_blocks, steps, TILE=tile,
        FEWEST=FEWEST_TILES, SEQUENCES=max(PLANNED_SEQUENCES, next_power_of_2(sequences + 1)), STEP=STEP_TOKENS,
        PAGE=PAGE_SIZE, CHUNK=256, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


widen_plan = register("widen_plan", widen_plan_reference, widen_plan_fake, widen_plan_launch, kind="plan")


WIDENED = tl.constexpr(16.0)  # factor of every fp16 scale, so that small ones keep their bits; attention removes it
# upper limit of (scale times largest value): the product does not overflow even if the scale is rounded up to fp16
LARGEST = tl.constexpr(65440.0)
PROGRAMS_AN_SM = 6  # all are resident with up to 80 registers per thread
# Convert four adjacent int8 ($2) to fp16 ($0, $1), times their row's scale ($3, as a pair). A byte with its sign bit
# flipped, below a byte 0x64, is the fp16 number value + 1152.
WIDEN_INT8 = tl.constexpr("""{ .reg .b32 x, a, b, middle;
    mov.b32 middle, 0x64806480;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 a, x, 0x64646464, 0x4140;
    prmt.b32 b, x, 0x64646464, 0x4342;
    sub.rn.f16x2 a, a, middle;
    sub.rn.f16x2 b, b, middle;
    mul.rn.f16x2 $0, a, $3;
    mul.rn.f16x2 $1, b, $3; }""")


def check(kv_cache: torch.Tensor, kv_scales: torch.Tensor, pages: torch.Tensor) -> None:
    """Raise ValueError, naming the argument, unless there are an int8 cache, its scales and two pages per step."""
    if kv_cache.dtype != torch.int8 or kv_cache.dim() != 5 or kv_cache.shape[2:4] != (2, PAGE_SIZE):
        raise ValueError(
            f"widen_kv: kv_cache is {kv_cache.dtype} {tuple(kv_cache.shape)}; it must be torch.int8 [pages, kv heads, "
            f"2, {PAGE_SIZE}, head_dim]"
        )
    if kv_scales.shape != kv_cache.shape[:4]:
        raise ValueError(
            f"widen_kv: kv_scales is {tuple(kv_scales.shape)}; with this cache it must be {tuple(kv_cache.shape[:4])}"
        )
    if pages.dim() != 2 or pages.shape[1] != STEP_TOKENS // PAGE_SIZE:
        raise ValueError(
            f"widen_kv: pages is {tuple(pages.shape)}; it must be [steps, {STEP_TOKENS // PAGE_SIZE}], from widen_plan"
        )


def widen_kv_reference(kv_cache: torch.Tensor, kv_scales: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return wide [steps, HK, 2, 128, D] fp16: keys and values of two pages per step, times 16 times their scales.

    kv_cache [NP, HK, 2, 64, D] int8, kv_scales [NP, HK, 2, 64] fp32
    pages [steps, 2] int32 from `widen_plan`; for -1 the GPU writes nothing, and this returns zeros
    """
    check(kv_cache, kv_scales, pages)
    listed = pages.flatten().long()
    chosen = listed.clamp_min(0)
    scale = (kv_scales[chosen] * WIDENED.value).clamp_max(LARGEST.value / QUANTIZED_MAX[torch.int8]).half()
    widened = kv_cache[chosen].half() * scale[..., None]
    widened[listed < 0] = 0
    heads, dim = kv_cache.shape[1], kv_cache.shape[4]
    return (
        widened.view(-1, 2, heads, 2, PAGE_SIZE, dim).permute(0, 2, 3, 1, 4, 5).reshape(-1, heads, 2, STEP_TOKENS, dim)
    )


def widen_kv_fake(kv_cache: torch.Tensor, kv_scales: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return an empty result."""
    check(kv_cache, kv_scales, pages)
    return kv_cache.new_empty(
        (pages.shape[0], kv_cache.shape[1], 2, STEP_TOKENS, kv_cache.shape[4]), dtype=torch.float16
    )


@triton.jit(do_not_specialize=["units"])
def _widen_kernel(
    cache, scales, pages, wide, units, limit, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr
):
    """Convert units: K and V of a page and kv head, which are contiguous. Units after the last page are at the end."""
    pdl_start(PDL)
    row = tl.arange(0, 2 * PAGE)
    dim = tl.arange(0, D)
    # eight adjacent values belong to one thread, in int8 and fp16: no exchange through shared memory
    dim = dim // 8 * 8 + dim % 8
    unit = tl.program_id(0)
    page = tl.load(pages + unit // HK, mask=unit < units, other=-1)
    while page >= 0:
        head = unit % HK
        source = (page.to(tl.int64) * HK + head) * (2 * PAGE)
        x = tl.load(cache + source * D + row[:, None] * D + dim[None, :])
        scale = tl.minimum(tl.load(scales + source + row) * WIDENED, limit).to(tl.float16)
        if INTERP:
            x = x.to(tl.float16) * scale[:, None]
        else:
            bits = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            x = tl.inline_asm_elementwise(
                WIDEN_INT8,
                "=r,=r,r,r,r,r,r",
                [x, (bits | (bits << 16))[:, None]],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            )
        entry = unit // HK  # page entry % 2 of step entry // 2
        target = ((entry // 2).to(tl.int64) * HK + head) * (4 * PAGE) + (entry % 2) * PAGE
        place = target + row // PAGE * (2 * PAGE) + row % PAGE
        tl.store(wide + place[:, None] * D + dim[None, :], x)
        unit += tl.num_programs(0)
        page = tl.load(pages + unit // HK, mask=unit < units, other=-1)


def widen_kv_launch(
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    pages: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (wide,) for the listed pages."""
    check(kv_cache, kv_scales, pages)
    require_contiguous("widen_kv", kv_cache=kv_cache, kv_scales=kv_scales, pages=pages)
    heads, dim = kv_cache.shape[1], kv_cache.shape[4]
    units = pages.numel() * heads
    if units == 0:
        return
    sms = multiprocessors(kv_cache.device)
    _widen_kernel[(min(units, PROGRAMS_AN_SM * min(sms, sm_budget or sms)),)](
        kv_cache, kv_scales, pages, out[0], units, LARGEST.value / QUANTIZED_MAX[torch.int8], HK=heads, D=dim,
        PAGE=PAGE_SIZE, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


widen_kv = register("widen_kv", widen_kv_reference, widen_kv_fake, widen_kv_launch, kind="widen_kv")
