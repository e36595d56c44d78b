"""Prompt attention that divides a long context among programs: its items, its results, its machine code."""

import math
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sidestream.ops.attention import prefill_gluon, prefill_gluon_tiles
from sidestream.ops.attention.numerics import split_workspace
from sidestream.ops.attention.paged_attention import paged_attention
from sidestream.ops.attention.paged_attention import paged_attention_reference as reference
from sidestream.ops.attention.widen_kv import widen_plan
from sidestream.ops.core.kv_layout import kv_cache_shape, kv_scales_shape
from sidestream.ops.core.triton_support import INTERPRETED
from support.attention import Batch, make_batch, relative_error, spills_in_main_loop, tolerance
from support.checks import bits, poison
from support.gluon_threads import _Pointer
from support.prefill_threads import in_threads
from support.sm90 import compile_launch, reads_under_way

E4M3, INT8, BF16, FP32 = torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32
STEP = 128
BATCHES = {  # name -> (cached tokens, new ones among them) of each sequence
    "a short chunk": ((2000, 5),),
    "a chunk over tiles": ((1937, 70),),
    "among decode rows": ((40, 1), (1500, 20), (700, 1), (2100, 1), (0, 1), (130, 60)),
    "nothing long": ((300, 40), (64, 64), (1, 1)),
    "no context": ((0, 30), (900, 3), (0, 0)),
}


def case(name: str, heads: int, kv_heads: int, padding: int = 40, **options: Any) -> Batch:
    contexts, counts = zip(*BATCHES[name], strict=True)
    return make_batch(
        contexts, counts, heads=heads, kv_heads=kv_heads, dim=128, padding=padding, **{"cache": INT8, **options}
    )


def attend(batch: Batch, split: bool = True, plan: Any = None, quantize_q: bool = False) -> torch.Tensor:
    q, cache, scales, table, lens, starts, scale, *_ = batch.args()
    out = poison(q.new_empty(q.shape[0], q.shape[1] * 128))
    prefill_gluon.launch(q, cache, scales, table, lens, starts, scale, quantize_q, out, False, plan, split=split)
    return out


# Items


def random_batch() -> tuple[list[int], list[int], int]:
    """Contexts, new tokens and rows past the end."""
    contexts = [random.choice([0, 1, 64, 700, random.randrange(20000)]) for _ in range(random.randrange(1, 7))]
    counts = [min(context, random.choice([0, 1, 3, 32, 33, 500])) for context in contexts]
    return contexts, counts, random.choice([0, 1, 40])


@pytest.mark.parametrize("planned", [False, True])
def test_items_read_each_step_of_each_tile_once(planned: bool) -> None:
    """Splits of a tile are distinct and fit in the workspace of one split per program; with few tiles no program has
    two items, and no item is much longer than the average.
    """
    for counted in (256, 2):  # sequences counted at a time
        with in_threads(1) as gl, patch.object(prefill_gluon_tiles, "COUNTED", counted):
            for _ in range(6):
                check_items(gl, *random_batch(), planned)


def check_items(gl: Any, contexts: list[int], counts: list[int], idle: int, planned: bool) -> None:
    kv_heads, tile, programs, fewest = random.choice([1, 2]), random.choice([16, 32]), random.choice([8, 40]), 4
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lens = torch.tensor(contexts).int()
    table = torch.zeros(len(contexts), 640, dtype=torch.int32)
    plan = widen_plan(table, lens, starts, tile, 1000)[0] if planned else starts
    tokens = sum(counts) + idle
    batch = (*(_Pointer(each.view(-1)) for each in (starts, lens, plan)), tokens, len(contexts))
    gl.machine.programs = programs
    items, chunk = prefill_gluon_tiles.plan_splits(batch, fewest, kv_heads, tile, planned, 4)
    read: dict[tuple[int, int, int], list[range]] = {}
    slots: set[int] = set()
    busy = 0
    for item in range(int(items) * kv_heads):
        head, sequence, first, end, _position, _length, steps, whole, skipped, (place, split, splits) = (
            prefill_gluon_tiles.find_split(item, (*batch, items, chunk), kv_heads, tile, planned, 4)
        )
        if first >= end:
            assert steps == 0
            continue
        busy += 1
        assert whole >= 0 and steps <= chunk
        read.setdefault((int(head), int(sequence), int(first)), []).append(range(int(skipped), int(skipped + steps)))
        if splits > 1:
            assert steps > 0 and (place + split) * kv_heads + head not in slots
            slots.add(int((place + split) * kv_heads + head))
    wanted = {}
    for sequence, (context, count) in enumerate(zip([*contexts, 0], [*counts, idle], strict=True)):
        if planned and (sequence == len(contexts) or plan[0, sequence] >= 0):
            continue
        for first in range(0, count, tile):
            steps = -(-min(context, max(context - count + first + tile, 0)) // STEP)
            for head in range(kv_heads):
                wanted[head, sequence, int(starts[sequence]) + first] = list(range(steps))
    assert {key: sorted(step for part in parts for step in part) for key, parts in read.items()} == wanted
    assert not slots or max(slots) < programs
    if 2 * len(wanted) <= programs:
        assert items * kv_heads <= programs
    assert busy <= len(wanted) + programs


# Results


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "programs"),
    [
        ("a short chunk", 4, 2, 11),
        ("a short chunk", 32, 1, 12),
        ("a chunk over tiles", 4, 1, 8),
        ("among decode rows", 4, 1, 8),
        ("nothing long", 4, 2, 11),
        ("no context", 4, 1, 8),
    ],
)
def test_splits_in_threads(name: str, heads: int, kv_heads: int, programs: int) -> None:
    """Near the reference, the same bits twice, and the counters are back at zero."""
    batch = case(name, heads, kv_heads)
    with in_threads(programs):
        first, again = attend(batch), attend(batch)
        whole = attend(batch, split=False)
    *_, arrivals = split_workspace(batch.q.device, 2 * programs, 1, 64, 128, "attention_prefill")
    assert not arrivals.any()
    assert torch.equal(bits(first), bits(again))
    assert relative_error(first, reference(*batch.args())) < tolerance(batch)
    assert relative_error(whole, reference(*batch.args())) < tolerance(batch)
    if name == "a short chunk":
        assert not torch.equal(first, whole), "nothing was split"


def test_other_sequences_are_left_to_the_wide_kernel() -> None:
    contexts, counts = [1400, 900, 1800], [3, 400, 1]
    batch = make_batch(contexts, counts, heads=4, kv_heads=1, dim=128, cache=INT8, padding=9)
    plan, _ = widen_plan(batch.block_table, batch.context_lens, batch.query_start, 32, 100)
    with in_threads(9):
        out = attend(batch, plan=plan)
    mine = torch.tensor([True] * 3 + [False] * 400 + [True] + [False] * 9)
    assert torch.equal(~out.isnan().any(1), mine) and torch.equal(~out.isnan().all(1), mine)
    assert relative_error(out[mine], reference(*batch.args())[mine]) < tolerance(batch)


def test_splits_need_few_tiles_and_a_long_table() -> None:
    cpu = torch.device("cpu")
    assert prefill_gluon.splits_tiles(8, 128, cpu) and prefill_gluon.splits_tiles(264, 9, cpu)
    assert not prefill_gluon.splits_tiles(265, 128, cpu)
    assert not prefill_gluon.splits_tiles(8, 8, cpu), "no context has two splits"


# Machine code


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (8, 8), (64, 2)])
@pytest.mark.parametrize("cache, quantize_q", [(INT8, False), (E4M3, True), (E4M3, False)], ids=["int8", "fp8", "e4m3"])
def test_the_kernel_with_splits_fits(
    cache: torch.dtype, quantize_q: bool, heads: int, kv_heads: int, planned: bool
) -> None:
    """Products are wgmma, the loop over steps has no spills, and no warp group waits for another's barrier."""

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    (code,) = compile_launch(
        prefill_gluon.launch,
        meta(64, heads, 128, dtype=BF16),
        meta(*kv_cache_shape(1000, kv_heads, 128), dtype=cache),
        meta(*kv_scales_shape(1000, kv_heads), dtype=FP32),
        meta(8, 128),
        meta(8),
        meta(9),
        0.1,
        quantize_q,
        meta(64, heads * 128, dtype=BF16),
        True,
        meta(3, 9) if planned else None,
    )
    assert spills_in_main_loop(code) <= 1 and code.shared_bytes <= 227 * 1024
    assert code.sass["HGMMA"] > 0 and code.sass["HMMA"] == 0 and code.sass["ATOMG"] == 2
    assert reads_under_way(code) == []


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cache, quantize_q, heads, kv_heads",
    [(INT8, False, 32, 8), (E4M3, True, 32, 8), (E4M3, False, 32, 8), (INT8, False, 64, 8), (INT8, False, 8, 8),
     (E4M3, True, 8, 1)],
    ids=["int8", "fp8", "e4m3", "64-8", "8-8", "8-1"],
)  # fmt: skip
@pytest.mark.parametrize(
    "sequences",
    [
        ((8192 + 32, 32),),
        ((32768, 16),),
        ((5000, 1), (700, 1), (9000, 40), (0, 1), (3000, 3)),
        ((4096, 128),),
        ((20000, 100), (64, 64), (1, 1), (1100, 7)),
    ],
    ids=["8k", "32k", "mixed", "tiles", "several"],
)
def test_splits_on_the_gpu(
    sequences: tuple[tuple[int, int], ...], heads: int, kv_heads: int, cache: torch.dtype, quantize_q: bool
) -> None:
    """Through the op, with and without PDL: near the reference, and the same bits each time."""
    contexts, counts = zip(*sequences, strict=True)
    batch = make_batch(
        contexts, counts, heads=heads, kv_heads=kv_heads, dim=128, cache=cache, padding=19, device="cuda"
    )
    args = batch.args(quantize_q)
    want = reference(*args)
    results = []
    for pdl in (False, True, True):
        results.append(poison(torch.empty_like(want)))
        paged_attention.launch(*args, out=(results[-1],), pdl=pdl)
    whole = poison(torch.empty_like(want))
    prefill_gluon.launch(*args[:8], whole, False, split=False)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert relative_error(whole, want) < 2 * tolerance(batch)
    assert relative_error(results[0], want) < 2 * tolerance(batch)
    for got, right in zip(results[0], want, strict=True):
        assert relative_error(got, right) < 5 * tolerance(batch) if right.any() else not got.any()


@pytest.mark.gpu
def test_a_captured_chunk_follows_the_lengths() -> None:
    """Lengths live on the device: a captured graph splits as the current ones need, again and again."""
    batch = make_batch(
        [9000, 3000, 40], [20, 3, 40], heads=32, kv_heads=8, dim=128, cache=INT8, padding=1, device="cuda"
    )
    args = batch.args()
    out = torch.empty(64, 32 * 128, dtype=BF16, device="cuda")
    paged_attention.launch(*args, out=(out,), pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            batch.q.add_(0.5)
            paged_attention.launch(*args, out=(out,), pdl=True)
    for lengths, counts in (([9000, 3000, 40], [20, 3, 40]), ([100, 3000, 0], [20, 1, 1]), ([8999, 1, 33], [60, 1, 2])):
        batch.context_lens.copy_(torch.tensor(lengths))
        batch.query_start.copy_(torch.tensor([0, *counts]).cumsum(0))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, reference(*args)) < 2 * tolerance(batch)
        assert not out[sum(counts) :].any()
