"""Pages of an int8 KV cache in fp16, each once, for an attention that reads them many times.

The numbers are those that prefill_gluon makes of a page on its way through shared memory, to the bit: a value times its
scale, which is first multiplied by 16, held below what fp16 can hold, and rounded to fp16.
"""

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors
from ..core.kv_layout import PAGE_SIZE, QUANTIZED_MAX
from ..core.registry import register
from ..core.triton_support import INTERP, pdl_options, pdl_start, require_contiguous
from .widen_plan import STEP_TOKENS

WIDENED = tl.constexpr(16.0)  # on every fp16 scale, so that small ones keep their bits; attention takes it out again
# of a scale times its dtype's largest value: rounded up to fp16 too, no product overflows
LARGEST = tl.constexpr(65440.0)
PROGRAMS_AN_SM = 6  # all of them at once with up to 80 registers
# Four int8 neighbours ($2) to fp16 ($0, $1), times their row's scale ($3, as a pair). With its sign bit flipped, an
# int8's byte below 0x64 is the fp16 number 1152 above it.
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
    """ValueError, naming the argument, for what is no int8 cache with its scales, or no list of two pages a step."""
    if kv_cache.dtype != torch.int8 or kv_cache.dim() != 5 or kv_cache.shape[2:4] != (2, PAGE_SIZE):
        raise ValueError(
            f"widen_kv: kv_cache is {kv_cache.dtype} {tuple(kv_cache.shape)}; it takes torch.int8 [pages, kv heads, "
            f"2, {PAGE_SIZE}, head_dim]"
        )
    if kv_scales.shape != kv_cache.shape[:4]:
        raise ValueError(
            f"widen_kv: kv_scales is {tuple(kv_scales.shape)}, beside this cache it must be {tuple(kv_cache.shape[:4])}"
        )
    if pages.dim() != 2 or pages.shape[1] != STEP_TOKENS // PAGE_SIZE:
        raise ValueError(
            f"widen_kv: pages is {tuple(pages.shape)}; it takes the [steps, {STEP_TOKENS // PAGE_SIZE}] that "
            "widen_plan makes"
        )


def reference(kv_cache: torch.Tensor, kv_scales: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """wide [steps, HK, 2, 128, D] fp16: keys and values of two pages a step, times 16 times their scales.

    kv_cache [NP, HK, 2, 64, D] int8, kv_scales [NP, HK, 2, 64] fp32
    pages [steps, 2] int32 from `widen_plan`; where it is -1 nothing is written on the GPU, zeros here
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


def fake(kv_cache: torch.Tensor, kv_scales: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    check(kv_cache, kv_scales, pages)
    return kv_cache.new_empty(
        (pages.shape[0], kv_cache.shape[1], 2, STEP_TOKENS, kv_cache.shape[4]), dtype=torch.float16
    )


@triton.jit(do_not_specialize=["units"])
def _widen_kernel(
    cache, scales, pages, wide, units, limit, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr
):
    """A unit is a page and kv head:

    K and V, which lie in one piece in the cache. Units behind the last page come last of all.
    """
    pdl_start(PDL)
    row = tl.arange(0, 2 * PAGE)
    dim = tl.arange(0, D)
    # says that eight neighbours are a thread's, of int8 as of fp16: then nothing goes through shared memory in between
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


def launch(
    kv_cache: torch.Tensor,
    kv_scales: torch.Tensor,
    pages: torch.Tensor,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (wide,) as far as there are pages."""
    check(kv_cache, kv_scales, pages)
    require_contiguous("widen_kv", kv_cache=kv_cache, kv_scales=kv_scales, pages=pages)
    heads, dim = kv_cache.shape[1], kv_cache.shape[4]
    units = pages.numel() * heads
    if units == 0:
        return
    sms = multiprocessors(kv_cache.device)
    _widen_kernel[(min(units, PROGRAMS_AN_SM * min(sms, sm_budget or sms)),)](
        kv_cache,
        kv_scales,
        pages,
        out[0],
        units,
        LARGEST.value / QUANTIZED_MAX[torch.int8],
        HK=heads,
        D=dim,
        PAGE=PAGE_SIZE,
        num_warps=4,
        **pdl_options(pdl),
    )


widen_kv = register("widen_kv", reference, fake, launch, kind="widen_kv")
