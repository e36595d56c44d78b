"""Pages that sequences of a decode step share: which they are, and attention that reads them once."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sidestream.ops.attention import decode_gluon_merge
from sidestream.ops.attention import prefix_attention as module
from sidestream.ops.attention.paged_attention import gather_keys_values, paged_attention, paged_attention_quant
from sidestream.ops.attention.paged_attention import paged_attention_reference as reference
from sidestream.ops.attention.paged_attention_blocks import paged_attention_blocks
from sidestream.ops.attention.prefill_gluon import tile_tokens
from sidestream.ops.attention.prefix_attention import OWNER, PAGES, SHARED, prefix_attention, prefix_plan
from sidestream.ops.core.kv_layout import PAGE_SIZE, kv_cache_shape, kv_scales_shape
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.ops.elementwise.quantize_blocks import dequantize_blocks
from support.attention import Batch, make_batch, relative_error, share_pages, spills_in_main_loop, tolerance
from support.checks import EXACT, bits, check_kernel, poison
from support.gluon_threads import _Pointer, kernels_in_threads
from support.prefill_threads import in_threads
from support.sm90 import compile_launch, launched, reads_under_way

E4M3, INT8, BF16, FP32 = torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32


def decode_batch(contexts: list[int], groups: list[tuple[list[int], int]], **options: Any) -> Batch:
    """A decode step; the rows of each group share so many pages."""
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 1, "dim": 128, "cache": INT8, **options}
    batch = make_batch(contexts, [1] * len(contexts), **sizes)
    for rows, pages in groups:
        share_pages(batch, rows, pages)
    return batch


# 11 sequences share 6 pages, with another one among them; 8 share 13; 5 only 2; the last are padding
CONTEXTS = [400 + 7 * row for row in range(12)] + [900] * 8 + [300] * 5 + [70] * 10 + [0] * 5
GROUPS = [([0, *range(2, 12)], 6), (list(range(32, 35)), 1), (list(range(12, 20)), 13), (list(range(20, 25)), 2)]


def tables(contexts: list[int], groups: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """block_table and context_lens."""
    table = torch.arange(len(contexts) * 40, dtype=torch.int32).view(-1, 40)
    for rows, pages in groups:
        for row in rows[1:]:
            table[row, :pages] = table[rows[0], :pages]
    return table, torch.tensor(contexts, dtype=torch.int32)


def random_tables() -> tuple[torch.Tensor, torch.Tensor]:
    groups = [
        (torch.randperm(37)[: int(torch.randint(2, 37, ()))].tolist(), int(torch.randint(1, 30, ()))) for _ in range(3)
    ]
    return tables(torch.randint(0, 2500, (37,)).tolist(), groups)


def mixed(**options: Any) -> Batch:
    return decode_batch(CONTEXTS, GROUPS, **options)


def prefix_of(batch: Batch) -> tuple[torch.Tensor, ...]:
    """The prefix's results and the plan, as the attention ops take them."""
    q, cache, scales, table, lens, _, scale, *_ = batch.args()
    plan = prefix_plan(table, lens, tile_tokens(q.shape[1], cache.shape[1]))
    return (*prefix_attention(q, cache, scales, table, plan, scale), plan)


# The plan


def test_the_most_frequent_prefix_of_a_tile_is_shared() -> None:
    plan = prefix_plan(*tables(CONTEXTS, GROUPS), 32)
    assert plan[SHARED].tolist() == [6, 0, *[6] * 10, *[0] * 28]
    assert plan[PAGES].tolist() == [6, *[0] * 39] and plan[OWNER, 0] == 0
    plan = prefix_plan(*tables(CONTEXTS, GROUPS), 4)
    assert plan[SHARED, 12:20].tolist() == [12] * 8, "an even number of pages"
    assert plan[PAGES, 3:5].tolist() == [12, 12] and plan[OWNER, 3:5].tolist() == [12, 16]
    assert not plan[SHARED, :4].any(), "three of four sequences are too few"


@pytest.mark.parametrize("tile", [4, 16, 32])
def test_shared_pages_are_full_and_equal(tile: int) -> None:
    for _ in range(20):
        table, lens = random_tables()
        plan = prefix_plan(table, lens, tile)
        for row, context in enumerate(lens.tolist()):
            shared, owner = int(plan[SHARED, row]), int(plan[OWNER, row // tile])
            assert shared in (0, int(plan[PAGES, row // tile])) and shared % 2 == 0
            assert shared * PAGE_SIZE <= max(0, context - 1), "the newest token's page is never shared"
            assert torch.equal(table[row, :shared], table[owner, :shared])


@pytest.mark.interpret
@pytest.mark.parametrize("tile", [4, 16, 32, 128])
def test_plan_kernel(tile: int) -> None:
    check_kernel(prefix_plan, *tables(CONTEXTS, GROUPS), tile, tolerances={0: EXACT})
    for _ in range(5):
        check_kernel(prefix_plan, *random_tables(), tile, tolerances={0: EXACT})


# Attention


def merged(batch: Batch, prefix: torch.Tensor, lse: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """The whole attention from the parts of the prefix and from torch's attention to the remaining pages."""
    q, cache, scales, table, lens, starts, scale, *_ = batch.args()
    out = reference(*batch.args(decode=True)).float().view(len(q), -1, 128)
    for row in range(len(q)):
        pages = int(plan[SHARED, row])
        if not pages:
            continue
        tail = Batch(
            q[row : row + 1].float(), cache, scales, table[row : row + 1, pages:], lens[row : row + 1] - 64 * pages,
            starts[:2], [batch.contexts[row] - 64 * pages], [1],
        )  # fmt: skip
        o = reference(*tail.args(decode=True)).view(-1, 128)
        used = lse[:, row] != 0
        weights = torch.exp2(torch.cat([lse[:, row], tail_lse(tail, scale)[None]]))
        weights[:-1] *= used
        parts = torch.cat([prefix[:, row], o[None]])
        out[row] = (parts * weights[..., None]).sum(0) / weights.sum(0)[:, None]
    return out.flatten(1)


def tail_lse(tail: Batch, scale: float) -> torch.Tensor:
    """The log2-sum-exp [heads] of the scores of one row."""
    context = tail.contexts[0]
    keys, _ = gather_keys_values(
        tail.kv_cache, tail.kv_scales, tail.block_table[0, : -(-context // PAGE_SIZE)].long(), context
    )
    heads = tail.q.shape[1]
    scores = torch.einsum("hd,hsd->hs", tail.q[0], keys.repeat_interleave(heads // len(keys), 0)) * scale
    return scores.logsumexp(-1) / math.log(2)


@pytest.mark.parametrize("cache", [INT8, E4M3])
def test_prefix_and_remaining_pages_are_the_whole(cache: torch.dtype) -> None:
    batch = mixed(cache=cache)
    prefix, lse, plan = prefix_of(batch)
    assert len(prefix) > 1 and plan[SHARED].any()
    assert relative_error(merged(batch, prefix, lse, plan), reference(*batch.args(decode=True))) < tolerance(batch)


@pytest.mark.parametrize(("heads", "kv_heads", "programs"), [(4, 1, 3), (8, 1, 40), (2, 2, 5)])
def test_prefix_kernel_in_threads(heads: int, kv_heads: int, programs: int) -> None:
    """Sequences that share pages have the reference's values; few programs compute several parts each."""
    batch = mixed(heads=heads, kv_heads=kv_heads)
    q, cache, scales, table, lens, _, scale, *_ = batch.args()
    plan = prefix_plan(table, lens, tile_tokens(heads, kv_heads))
    args = (q, cache, scales, table, plan, scale)
    want, want_lse = prefix_attention.reference(*args)
    out, lse = (poison(each) for each in prefix_attention.fake(*args))
    with in_threads(programs), patch.object(module, "multiprocessors", lambda _device: programs):
        prefix_attention.launch(*args, out=(out, lse))
    used = want_lse != 0
    assert used.any() and not out[used].isnan().any()
    assert relative_error(out[used], want[used]) < tolerance(batch)
    assert float((lse[used] - want_lse[used]).abs().max()) < 1e-2


def test_misfits_are_named() -> None:
    batch = mixed()
    prefix, lse, plan = prefix_of(batch)
    args = (*batch.args(decode=True), None, None, 0, 0, False)
    assert torch.equal(paged_attention(*args, prefix, lse, plan), paged_attention(*args))
    for more, named in (
        ((prefix, lse, None), "together"),
        ((prefix[:, :3], lse, plan), "prefix, prefix_lse and prefix_plan are"),
        ((prefix, lse, plan[:2]), "they must be"),
    ):
        with pytest.raises(ValueError, match=named):
            paged_attention(*args, *more)
    with pytest.raises(ValueError, match="decode=False"):
        paged_attention(*batch.args(), None, None, 0, 0, False, prefix, lse, plan)
    with pytest.raises(ValueError, match="8-bit cache"):
        prefix_attention(batch.q, batch.kv_cache.float(), batch.kv_scales, batch.block_table, plan, 0.1)
    with pytest.raises(ValueError, match="plan is"):
        prefix_attention(batch.q, batch.kv_cache, batch.kv_scales, batch.block_table, plan[:1], 0.1)


@pytest.mark.skipif(INTERPRETED, reason="needs the kernel's own Python code")
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_decode_merges_the_parts_of_a_prefix(count: int) -> None:
    """Four query heads of a sequence, in a launch of three sequences; without parts its own result is unchanged."""
    used, width, first = 4, 8, 4
    parts, lses = torch.randn(3, 12, 128), 4 * torch.randn(3, 12)
    o, lse = torch.randn(width, 128), 4 * torch.randn(width)
    with kernels_in_threads(decode_gluon_merge):
        loaded = decode_gluon_merge.load_prefix(
            _Pointer(parts.view(-1)), _Pointer(lses.view(-1)), count, first, 12, used, width, 2
        )
        merged_o, merged_lse = decode_gluon_merge.merge_prefix(o, lse, loaded)
    rows = slice(first, first + used)
    # the sums of decode_gluon have a factor 2^8
    weights = torch.cat([torch.exp2(lses[:count, rows] + 8), torch.exp2(lse[None, :used])])
    want = (weights[..., None] * torch.cat([parts[:count, rows], o[None, :used]])).sum(0) / weights.sum(0)[:, None]
    torch.testing.assert_close(torch.as_tensor(merged_o[:used]), want)
    torch.testing.assert_close(torch.as_tensor(merged_lse[:used]), weights.sum(0).log2())
    assert count or (torch.equal(merged_o, o) and torch.equal(merged_lse, lse))


# Machine code


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("sequences", [64, 256])
@pytest.mark.parametrize("cache", [INT8, E4M3], ids=["int8", "e4m3"])
def test_kernels_fit(cache: torch.dtype, sequences: int) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, table, lens = meta(sequences, 32, 128, dtype=BF16), meta(sequences, 128), meta(sequences)
    stored = meta(*kv_cache_shape(1000, 8, 128), dtype=cache), meta(*kv_scales_shape(1000, 8), dtype=FP32)
    plan = prefix_plan.fake(table, lens, 32)
    (code,) = launched(prefix_plan, table, lens, 32, pdl=True)
    assert code.spills == 0
    (code,) = launched(prefix_attention, q, *stored, table, plan, 0.1, pdl=True)
    assert spills_in_main_loop(code) <= 1 and reads_under_way(code) == []
    prefix = (*prefix_attention.fake(q, *stored, table, plan, 0.1), plan)
    (code,) = compile_launch(
        paged_attention.launch,
        *(q, *stored, table, lens, meta(sequences + 1), 0.1, False, True, None, None, 0, 0, False, *prefix),
        out=(meta(sequences, 4096, dtype=BF16),),
        pdl=True,
    )
    assert code.name == "decode_kernel" and code.spills == 0 and reads_under_way(code) == []
    assert code.registers <= 160 and code.shared_bytes * 4 <= 227 * 1024


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cache, heads, kv_heads",
    [(INT8, 32, 8), (E4M3, 32, 8), (INT8, 64, 8), (INT8, 8, 8), (E4M3, 8, 1)],
    ids=["int8", "e4m3", "64-8", "8-8", "8-1"],
)
@pytest.mark.parametrize("sequences, pages, longest", [(16, 130, 9000), (64, 16, 2000), (256, 16, 1400), (256, 5, 500)])
def test_on_the_gpu(sequences: int, pages: int, longest: int, heads: int, kv_heads: int, cache: torch.dtype) -> None:
    """All forms, with and without PDL: near the reference of the whole, and the same bits twice."""
    contexts = torch.randint(pages * PAGE_SIZE + 1, longest, (sequences,)).tolist()
    contexts[3], contexts[-1] = 40, 0
    rows = [row for row in range(sequences - 1) if row not in (3, 7)]
    batch = decode_batch(contexts, [(rows, pages)], heads=heads, kv_heads=kv_heads, cache=cache, device="cuda")
    q, stored, scales, table, lens, _, scale, *_ = batch.args()
    want = reference(*batch.args(decode=True))
    plan = poison(torch.empty(3, sequences, dtype=torch.int32, device="cuda"))
    tile = tile_tokens(heads, kv_heads)
    prefix_plan.launch(table, lens, tile, out=(plan,))
    assert torch.equal(plan, prefix_plan.reference(table, lens, tile)) and plan[SHARED].any()
    results = []
    for pdl in (False, True, True):
        prefix = [poison(each) for each in prefix_attention.fake(q, stored, scales, table, plan, scale)]
        prefix_attention.launch(q, stored, scales, table, plan, scale, out=tuple(prefix), pdl=pdl)
        out = poison(torch.empty_like(want))
        args = (*batch.args(decode=True), None, None, 0, 0, False, *prefix, plan)
        paged_attention.launch(*args, out=(out,), pdl=pdl)
        results.append(out)
        assert relative_error(out, want) < tolerance(batch)
        for got, right in zip(out, want, strict=True):
            assert relative_error(got, right) < 3 * tolerance(batch) if right.any() else not got.any()
    assert torch.equal(bits(results[0]), bits(results[1])) and torch.equal(bits(results[0]), bits(results[2]))
    o, *_ = paged_attention_quant(*batch.args(False, True), True, INT8, 0, None, None, 0, 0, False, *prefix, plan)
    assert relative_error(o, want) < tolerance(batch)
    in_blocks = (q, stored, scales, table, lens, scale, INT8, 0, None, 1, *prefix, plan)
    blocks = tuple(poison(each) for each in paged_attention_blocks.fake(*in_blocks))
    paged_attention_blocks.launch(*in_blocks, out=blocks, pdl=True)
    assert relative_error(dequantize_blocks(*blocks), want) < 0.02
