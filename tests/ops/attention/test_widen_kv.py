"""widen_plan and widen_kv: which sequences are widened, and what becomes of their pages; and attention that reads
it, in threads, compiled, and on a GPU.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sidestream.ops.attention import prefill_gluon, prefill_gluon_merge, prefill_gluon_tiles, prefill_wide_gluon
from sidestream.ops.attention import prefill_gluon_softmax as prefill_gluon_pieces
from sidestream.ops.attention.paged_attention import paged_attention, paged_attention_quant, paged_attention_reference
from sidestream.ops.attention.widen_kv import FEWEST_TILES, widen_kv, widen_plan
from sidestream.ops.core import gluon_support
from sidestream.ops.core.kv_layout import PAGE_SIZE, kv_cache_shape, kv_scales_shape
from support.attention import BF16, FP32, INT8, Batch, make_batch, relative_error, spills_in_main_loop, tolerance
from support.checks import EXACT, bits, check_kernel, poison
from support.gluon_threads import kernels_in_threads
from support.sm90 import MachineCode, compile_launch

BATCHES = {  # name -> (cached tokens, new ones among them) of each sequence
    "one": ((300, 300),),
    "with history": ((200, 130), (640, 140), (129, 129)),
    "mixed": ((40, 1), (300, 290), (700, 1), (130, 130), (64, 64), (5, 5)),
    "empty ones": ((0, 0), (257, 257), (0, 1), (0, 200), (128, 128), (9, 0)),
    "short": ((90, 3), (1, 1)),
}


def tables(sequences: Sequence[tuple[int, int]], blocks: int = 14, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """block_table, context_lens, query_start."""
    table = torch.randperm(len(sequences) * blocks).int().view(-1, blocks)
    contexts, counts = zip(*sequences, strict=True)
    return (
        table.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.tensor([0, *counts]).cumsum(0).int().to(device),
    )


# The plan


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("tile", "steps"), [(32, 100), (8, 3), (1, 6), (32, 0)])
def test_plan_gives_each_token_one_kernel(name: str, tile: int, steps: int) -> None:
    batch = BATCHES[name]
    table, lens, starts = tables(batch)
    plan, pages = widen_plan(table, lens, starts, tile, steps)
    listed = pages.flatten().tolist()
    wanted = free = 0
    for b, (context, count) in enumerate(batch):
        tiles = -(-count // tile)
        wide, narrow = (int(plan[row, b + 1] - plan[row, b]) for row in (1, 2))
        assert (wide, narrow) in ((tiles, 0), (0, tiles))
        place = int(plan[0, b])
        wanted += -(-context // 128) if count >= FEWEST_TILES * tile else 0
        if place < 0:
            assert not wide and (count < FEWEST_TILES * tile or wanted > steps)
            continue
        assert not narrow and count >= FEWEST_TILES * tile and place == free
        free += -(-context // 128)
        owned = table[b, : -(-context // PAGE_SIZE)].tolist()
        assert listed[2 * place : 2 * free] == owned + owned[-1:] * (len(owned) % 2)
    assert int(plan[0, -1]) == free <= steps and listed[2 * free :] == [-1] * (2 * (steps - free))


def test_a_sequence_that_does_not_fit_and_those_after_it_stay() -> None:
    table, lens, starts = tables([(200, 128), (600, 128), (100, 128)])
    assert widen_plan(table, lens, starts, 32, 8)[0][0].tolist() == [0, 2, 7, 8]
    assert widen_plan(table, lens, starts, 32, 7)[0][0].tolist() == [0, 2, -1, 7]
    assert widen_plan(table, lens, starts, 32, 6)[0].tolist() == [[0, -1, -1, 2], [0, 4, 4, 4], [0, 0, 4, 8]]


@pytest.mark.interpret
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("tile", "steps"), [(32, 100), (8, 3), (1, 6), (4, 700)])
def test_plan_kernel(name: str, tile: int, steps: int) -> None:
    check_kernel(widen_plan, *tables(BATCHES[name]), tile, steps, tolerances={0: EXACT, 1: EXACT})


# The pages


def stored(pages: int, kv_heads: int, dim: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A cache full of int8, with scales from tiny to such as fp16 cannot hold with the values."""
    cache = torch.randint(-127, 128, kv_cache_shape(pages, kv_heads, dim), dtype=torch.int8, device=device)
    return cache, torch.exp(torch.randn(kv_scales_shape(pages, kv_heads), device=device) * 6 - 3)


def test_reference_is_the_cache_page_by_page() -> None:
    cache, scales = stored(5, 2, 16)
    scales[0] = 0.37
    wide = widen_kv(cache, scales, torch.tensor([[3, 0], [-1, -1]], dtype=torch.int32))
    assert (
        wide.shape == (2, 2, 2, 128, 16) and wide.dtype == torch.float16 and wide.isfinite().all() and not wide[1].any()
    )
    for which in range(2):
        for token in (0, 63):
            exact = cache[0, 1, which, token].double() * float(torch.tensor(0.37 * 16).half())
            assert torch.equal(wide[0, 1, which, 64 + token], exact.half())
            assert torch.equal(
                wide[0, 0, which, token].sign(), cache[3, 0, which, token].sign() * (wide[0, 0, which, token] != 0)
            )


def test_misfits_are_named() -> None:
    cache, scales = stored(3, 2, 16)
    pages = torch.zeros(2, 2, dtype=torch.int32)
    for given, named in (
        ((cache.float(), scales, pages), "float32"),
        ((cache, scales[:2], pages), "kv_scales"),
        ((cache, scales, pages[:, :1]), "pages is"),
    ):
        with pytest.raises(ValueError, match=named):
            widen_kv(*given)


@pytest.mark.interpret
@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 128), (3, 64)])
def test_widen_kernel(kv_heads: int, dim: int) -> None:
    check_widened(*stored(7, kv_heads, dim), torch.tensor([[3, 1], [0, 0], [6, 2], [-1, -1]], dtype=torch.int32), 3)


def check_widened(cache: torch.Tensor, scales: torch.Tensor, pages: torch.Tensor, used: int) -> None:
    """The kernel's bits are the reference's, and after the last page nothing is written."""
    out = poison(widen_kv.fake(cache, scales, pages))
    untouched = out.clone()
    widen_kv.launch(cache, scales, pages, out=(out,), pdl=cache.is_cuda)
    assert torch.equal(bits(out[:used]), bits(widen_kv.reference(cache, scales, pages)[:used]))
    assert torch.equal(bits(out[used:]), bits(untouched[used:]))


def test_kernels_compile_without_spills() -> None:
    cache, scales = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in ((kv_cache_shape(99, 8, 128), INT8), (kv_scales_shape(99, 8), FP32))
    )
    given = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((8, 128), (8,), (9,))]
    plan, pages = widen_plan.fake(*given, 32, 512)
    (first,) = compile_launch(widen_plan.launch, *given, 32, 512, out=(plan, pages), pdl=True)
    (second,) = compile_launch(
        widen_kv.launch, cache, scales, pages, out=(widen_kv.fake(cache, scales, pages),), pdl=True
    )
    assert first.spills == second.spills == 0 and second.registers <= 80
    assert second.ptx["mul.rn.f16x2"] == 64, "the product is the converters'"


# Attention


def widened(batch: Batch, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(wide full of NaN after the last page, plan, pages)."""
    heads, kv_heads = batch.q.shape[1], batch.kv_cache.shape[1]
    tile = prefill_gluon.tile_tokens(heads, kv_heads)
    plan, pages = widen_plan(batch.block_table, batch.context_lens, batch.query_start, tile, steps)
    assert batch.kv_scales is not None
    wide = poison(widen_kv.fake(batch.kv_cache, batch.kv_scales, pages))
    if batch.q.is_cuda:
        widen_kv.launch(batch.kv_cache, batch.kv_scales, pages, out=(wide,), pdl=True)
    else:
        used = int(plan[0, -1])
        wide[:used] = widen_kv.reference(batch.kv_cache, batch.kv_scales, pages)[:used]
    return wide, plan, pages


def case(name: str, heads: int, kv_heads: int, device: str = "cpu", padding: int = 40) -> Batch:
    contexts, counts = zip(*BATCHES[name], strict=True)
    return make_batch(
        contexts, counts, heads=heads, kv_heads=kv_heads, dim=128, cache=INT8, padding=padding, device=device
    )


def test_arguments_that_do_not_belong_together_are_named() -> None:
    batch = case("one", 2, 1)
    wide, plan, _ = widened(batch, 4)
    assert torch.equal(paged_attention(*batch.args(), wide, plan), paged_attention(*batch.args()))
    quantized, plain = (paged_attention_quant(*batch.args(), True, INT8, 0, *more) for more in ((wide, plan), ()))
    assert all(torch.equal(a, b) for a, b in zip(quantized, plain, strict=True))
    for more, named in (
        ((wide, None), "plan is missing"),
        ((None, plan), "wide is missing"),
        ((wide[..., :64], plan), "wide is"),
        ((wide, plan[:2]), "plan"),
    ):
        with pytest.raises(ValueError, match=named):
            paged_attention(*batch.args(), *more)
    with pytest.raises(ValueError, match="3 heads on 1"):
        paged_attention(batch.q.repeat(1, 2, 1)[:, :3], *batch.args()[1:], wide, plan)
    with pytest.raises(ValueError, match="decode"):
        paged_attention(*batch.args(decode=True), wide, plan)


@contextmanager
def in_threads(programs: int) -> Iterator[None]:
    """Both Gluon kernels in threads, on a GPU of `programs` SMs; what is inline assembly there is spelled in torch
    here.
    """
    pieces, narrow, wide = prefill_gluon_pieces, prefill_gluon, prefill_wide_gluon

    def boxes(memory: torch.Tensor, *shape: int) -> SimpleNamespace:
        return SimpleNamespace(base=memory.view(-1, shape[1]), block_shape=shape)

    with kernels_in_threads(gluon_support, pieces, prefill_gluon_tiles, prefill_gluon_merge, narrow, wide):
        known: dict[str, Any] = {
            name: getattr(module, name)
            for module, names in (
                (pieces, ("gl", "mbarrier", "fence_async_shared")),
                (gluon_support, ("tma_load", "view_shared", "gdc_wait", "gdc_launch_dependents")),
            )
            for name in names
        } | {"multiprocessors": lambda _device: programs}
        known["gl"].inline_asm_elementwise = lambda _text, _constraints, values, **_: values[0].half()
        with (
            patch.multiple(pieces, pack=lambda p: p.half(), unpack=lambda p: p),
            patch.multiple(narrow, **known, widen=lambda x, scale: x.half() * scale),
            patch.object(narrow, "descriptors", lambda cache, scales: (boxes(cache, 64, 128), boxes(scales, 1, 64))),
            patch.multiple(wide, **known, descriptor=lambda memory: boxes(memory, 128, 128)),
        ):
            yield


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "steps", "programs"),
    [(4, 1, 30, 3), (2, 1, 7, 2), (4, 2, 3, 3), (32, 1, 20, 5), (2, 2, 0, 2)],
)
@pytest.mark.parametrize("turns", [True, False])
def test_kernels_in_threads(
    name: str,
    heads: int,
    kv_heads: int,
    steps: int,
    programs: int,
    turns: bool,
    request: pytest.FixtureRequest,
) -> None:
    """Every row is written by one of the two, whatever does not fit; with few programs, so that their rings are in
    mid-turn from tile to tile. Batches and heads take turns with `turns`; with --exhaustive each has both.
    """
    places = request.node.callspec.indices
    if turns != bool((places["name"] + places["heads"]) % 2) and not request.config.getoption("--exhaustive"):
        pytest.skip("this batch and these heads have the other value; run with --exhaustive")
    batch = case(name, heads, kv_heads)
    q, cache, scales, table, lens, starts, scale, *_ = batch.args()
    wide, plan, _ = widened(batch, max(steps, 1))
    out = poison(q.new_empty(q.shape[0], heads * 128))
    with in_threads(programs), patch.object(prefill_wide_gluon, "TURNS", turns):
        prefill_wide_gluon.launch(q, wide, plan, lens, starts, scale, out, False)
        prefill_gluon.launch(q, cache, scales, table, lens, starts, scale, False, out, False, plan)
    assert not out.isnan().any()
    assert relative_error(out, paged_attention_reference(*batch.args())) < tolerance(batch) or not out.any()


def test_each_kernel_writes_its_own_rows() -> None:
    batch = case("mixed", 4, 1)
    q, _cache, _scales, _table, lens, starts, scale, *_ = batch.args()
    wide, plan, _ = widened(batch, 30)
    out = poison(q.new_empty(q.shape[0], 4 * 128))
    with in_threads(3):
        prefill_wide_gluon.launch(q, wide, plan, lens, starts, scale, out, False)
    mine = [(plan[0, :-1] >= 0)[b].item() for b, (_, count) in enumerate(BATCHES["mixed"]) for _ in range(count)] + [
        True
    ] * 40
    assert torch.equal(~out.isnan().any(1), torch.tensor(mine)) and torch.equal(~out.isnan().all(1), torch.tensor(mine))


def compiled(launch: Any, *more: Any, heads: int = 32, kv_heads: int = 8) -> MachineCode:
    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, out = meta(1000, heads, 128, dtype=BF16), meta(1000, heads * 128, dtype=BF16)
    cache, scales, pages = (
        meta(*kv_cache_shape(99, kv_heads, 128), dtype=INT8),
        meta(*kv_scales_shape(99, kv_heads), dtype=FP32),
        meta(512, 2),
    )
    codes = compile_launch(
        paged_attention.launch,
        q,
        cache,
        scales,
        meta(8, 128),
        meta(8),
        meta(9),
        0.1,
        False,
        False,
        widen_kv.fake(cache, scales, pages),
        meta(3, 9),
        out=(out,),
        pdl=True,
    )
    return next(code for code in codes if code.name == launch)


@pytest.mark.machine_code
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 16), (32, 1)])
def test_wide_kernel_fits(heads: int, kv_heads: int) -> None:
    code = compiled("prefill_wide_kernel", heads=heads, kv_heads=kv_heads)
    assert (
        spills_in_main_loop(code) <= 2
        and code.shared_bytes <= 227 * 1024
        and code.registers * code.num_warps * 32 <= 65536
    )
    # two boxes of 64 columns each for K and V
    assert code.sass["HGMMA"] > 0 and code.sass["HMMA"] == 0 and code.sass["UTMALDG"] == 4
    assert spills_in_main_loop(compiled("prefill_kernel", heads=heads, kv_heads=kv_heads)) <= 3


@pytest.mark.parametrize("kernel", ["prefill_wide_kernel", "prefill_kernel"])
def test_the_softmax_runs_next_to_the_product(kernel: str) -> None:
    """Between the wait for the scores and the wait for the older product lie the exponentials, not after both."""
    text = compiled(kernel).sass_text
    waits = [part for part in text.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1:]]
    assert len(waits) >= 4
    assert all(part.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0].count("MUFU.EX2") >= 64 for part in waits)


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 128), (3, 64)])
def test_widen_kernel_on_the_gpu(kv_heads: int, dim: int) -> None:
    pages = torch.randint(0, 500, (300, 2), dtype=torch.int32, device="cuda")
    pages[170:] = -1
    for _ in range(2):
        check_widened(*stored(500, kv_heads, dim, "cuda"), pages, 170)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BATCHES)
def test_plan_kernel_on_the_gpu(name: str) -> None:
    for tile, steps in ((32, 100), (8, 3), (1, 6), (4, 700)):
        check_kernel(
            widen_plan, *tables(BATCHES[name], device="cuda"), tile, steps, tolerances={0: EXACT, 1: EXACT}, pdl=True
        )
    many = [(int(context), int(context) if context % 3 else 1) for context in torch.randint(1, 800, (300,))]
    check_kernel(widen_plan, *tables(many, device="cuda"), 32, 400, tolerances={0: EXACT, 1: EXACT}, pdl=True)


def check_same_bits(batch: Batch, steps: int) -> None:
    """Widened, with PDL and without, twice: the bits of the kernel that converts, and near the reference."""
    args, shape = batch.args(), (batch.q.shape[0], batch.q.shape[1] * 128)
    want = poison(torch.empty(shape, dtype=BF16, device="cuda"))
    paged_attention.launch(*args, out=(want,))
    for pdl in (True, False, True):
        wide, plan, _ = widened(batch, steps)
        out = poison(torch.empty(shape, dtype=BF16, device="cuda"))
        paged_attention.launch(*args, wide, plan, out=(out,), pdl=pdl)
        torch.cuda.synchronize()
        assert not out.isnan().any()
        wrong = (
            (bits(out).view(out.shape[0], -1) != bits(want).view(out.shape[0], -1)).any(1).nonzero().flatten().tolist()
        )
        assert not wrong, f"{len(wrong)} rows have other bits, the first is {wrong[0]}"
    expected = paged_attention_reference(*args)
    assert relative_error(out, expected) < 2 * tolerance(batch) or not expected.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8), (4, 2), (16, 2), (16, 1), (32, 1)])
def test_same_bits_on_the_gpu(name: str, heads: int, kv_heads: int) -> None:
    for steps in (40, 3, 1):
        check_same_bits(case(name, heads, kv_heads, "cuda", padding=100), steps)


@pytest.mark.gpu
@pytest.mark.parametrize("round_", range(5))
def test_many_tiles_on_the_gpu(round_: int) -> None:
    """More tiles than SMs; chunks with long and odd histories among decode rows; all fits, some fits, nothing fits."""
    counts = [1000, 1, 170, 640, 0, 333, 2000, 1, 127]
    batch = make_batch(
        [1000, 700 + round_, 170, 4000 - 63 * round_, 64, 334, 2129, 5000, 300],
        counts,
        heads=32,
        kv_heads=8,
        dim=128,
        cache=INT8,
        padding=30,
        device="cuda",
    )
    for steps in (200, 45, 1):
        check_same_bits(batch, steps)


@pytest.mark.gpu
def test_scales_of_every_size_on_the_gpu() -> None:
    batch = make_batch([900, 300], [200, 300], heads=32, kv_heads=8, dim=128, cache=INT8, device="cuda")
    assert batch.kv_scales is not None
    batch.kv_scales *= torch.tensor([1e-3, 1.0, 300.0, 0.05], device="cuda").repeat(16)
    check_same_bits(batch, 20)


@pytest.mark.gpu
def test_a_captured_step_follows_the_lengths_on_the_gpu() -> None:
    """Plan, pages, attention and what reads it, captured with PDL and replayed for other lengths; `wide` is written
    over in between, as by other layers.
    """
    batch = make_batch(
        [2000, 500, 64, 700], [600, 400, 1, 300], heads=32, kv_heads=8, dim=128, cache=INT8, padding=10, device="cuda"
    )
    args = batch.args()
    table, lens, starts = args[3:6]
    plan, pages = widen_plan.fake(table, lens, starts, 32, 24)
    wide = widen_kv.fake(*args[1:3], pages)
    out, total = (torch.empty(batch.q.shape[0], 4096, dtype=BF16, device="cuda") for _ in range(2))

    def step() -> None:
        widen_plan.launch(table, lens, starts, 32, 24, out=(plan, pages), pdl=True)
        for _ in range(3):
            widen_kv.launch(*args[1:3], pages, out=(wide,), pdl=True)
            paged_attention.launch(*args, wide, plan, out=(out,), pdl=True)
            total.copy_(out)
            wide.fill_(math.nan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([2000, 500, 64, 700], [601, 400, 0, 300], [1999, 0, 3, 690]):
        lens.copy_(torch.tensor(lengths))
        poison(out)
        graph.replay()
        torch.cuda.synchronize()
        want = torch.empty_like(out)
        paged_attention.launch(*args, out=(want,))
        assert torch.equal(bits(total), bits(want))
