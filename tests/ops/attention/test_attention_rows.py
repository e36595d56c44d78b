"""Attention of steps with drafts: a few rows per sequence, with splits as in a decode step."""

import math
from typing import Any

import pytest
import torch
from sidestream.ops.attention import decode as attention_decode
from sidestream.ops.attention.paged_attention import paged_attention, paged_attention_quant
from sidestream.ops.attention.paged_attention import paged_attention_reference as reference
from sidestream.ops.attention.paged_attention_blocks import paged_attention_blocks
from sidestream.ops.core.dtypes import QUANTIZED_MAX
from sidestream.ops.core.kv_layout import kv_cache_shape, kv_scales_shape
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.ops.elementwise.quantize_blocks import dequantize_blocks
from support.attention import Batch, make_batch, relative_error, tolerance
from support.checks import bits, poison
from support.sm90 import compile_launch

E4M3, INT8, BF16, FP32 = torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32
# drafts that start a page, and end one; no drafts; padding; a single token
CONTEXTS, COUNTS = [130, 64, 300, 0, 1, 67], [4, 4, 1, 0, 1, 3]


def batch_of(contexts: list[int], counts: list[int], rows: int, **options: Any) -> Batch:
    """Sequences with counts[b] <= rows rows each, then padding rows."""
    return make_batch(contexts, counts, padding=len(counts) * rows - sum(counts), **options)


def row_args(batch: Batch, rows: int, window: int = 0) -> tuple[Any, ...]:
    return (*batch.args(), None, None, window, rows)


def check(batch: Batch, rows: int, launch: Any = paged_attention.launch, pdl: bool = False, window: int = 0) -> None:
    """Launch twice into NaNs: same bits, rows near the reference's, zeros in padding rows."""
    args = row_args(batch, rows, window)
    first, again = (poison(paged_attention.fake(*args)) for _ in range(2))
    for out in (first, again):
        launch(*args, out=(out,), pdl=pdl)
    assert torch.equal(bits(first), bits(again)), "other bits at a second launch"
    assert not first.isnan().any()
    for row, (got, want) in enumerate(zip(first, reference(*args), strict=True)):
        assert want.any() or not got.any(), f"padding row {row} was written"
        assert not want.any() or relative_error(got, want) < 3 * tolerance(batch), f"row {row}"


def in_triton(*args: Any, out: tuple[torch.Tensor, ...], pdl: bool = False) -> None:
    q, cache, scales, table, lens, starts, scale, *_, window, rows = args
    attention_decode.launch_triton(q, cache, scales, table, lens, scale, out[0], pdl, window, starts, rows)


def test_a_row_is_what_a_step_of_its_own_would_give() -> None:
    """Row r of n sees the context but its last n - 1 - r tokens."""
    batch = batch_of([130, 70], [4, 2], 4, cache=INT8)
    got = paged_attention(*row_args(batch, 4))
    for row, (sequence, context) in enumerate([(0, 127), (0, 128), (0, 129), (0, 130), (1, 69), (1, 70)]):
        alone = paged_attention(
            batch.q[row : row + 1],
            batch.kv_cache,
            batch.kv_scales,
            batch.block_table[sequence : sequence + 1],
            torch.tensor([context], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            1.0 / math.sqrt(64),
            False,
            True,
        )
        assert torch.equal(got[row], alone[0])
    assert not got[6:].any()


def test_rows_that_do_not_fit_are_named() -> None:
    batch = batch_of([130, 70], [4, 2], 4, cache=INT8, dim=128)
    with pytest.raises(ValueError, match="q has 8 rows; with rows=2 and 2 sequences it must have 4"):
        paged_attention(*row_args(batch, 2))
    q, cache, scales, table, lens, *_ = batch.args()
    with pytest.raises(ValueError, match="needs query_start"):
        paged_attention_blocks(q, cache, scales, table, lens, 0.1, INT8, 0, None, 4)


def test_blocks_are_the_quantized_rows() -> None:
    batch = batch_of([130, 70], [4, 2], 4, cache=INT8, dim=128)
    q, cache, scales, table, lens, starts, scale, *_ = batch.args()
    quantized, steps = paged_attention_blocks(q, cache, scales, table, lens, scale, INT8, 0, starts, 4)
    want = paged_attention(*row_args(batch, 4))
    assert relative_error(dequantize_blocks(quantized, steps), want) < 0.01
    assert not quantized[6:].any() and not steps[:, 8:].any()


@pytest.mark.interpret
@pytest.mark.parametrize("cache", [E4M3, INT8, BF16, FP32], ids=["e4m3", "int8", "bf16", "fp32"])
@pytest.mark.parametrize("heads, kv_heads, rows", [(4, 2, 4), (3, 1, 4), (1, 1, 8)])
def test_the_decode_kernel_takes_rows(cache: torch.dtype, heads: int, kv_heads: int, rows: int) -> None:
    """Contexts in splits; the last split may have only drafts."""
    dtype = FP32 if cache == FP32 else BF16
    check(batch_of(CONTEXTS, COUNTS, rows, heads=heads, kv_heads=kv_heads, cache=cache, dtype=dtype), rows)


@pytest.mark.interpret
@pytest.mark.parametrize("window", [1, 61, 64, 130])
def test_each_row_has_a_window_of_its_own(window: int) -> None:
    """A sequence begins at the page that its first row reaches."""
    check(batch_of([130, 68, 300, 0, 1, 67], COUNTS, 4, cache=INT8), 4, window=window)


@pytest.mark.interpret
def test_without_splits_and_in_blocks() -> None:
    batch = batch_of([130, 64, 0], [8, 3, 0], 8, heads=8, kv_heads=1, cache=INT8, dim=128)
    batch.block_table = batch.block_table[:, :3].contiguous()
    check(batch, 8)
    q, cache, scales, table, lens, starts, scale, *_ = batch.args()
    args = (q, cache, scales, table, lens, scale, INT8, 0, starts, 8)
    out = tuple(poison(tensor) for tensor in paged_attention_blocks.fake(*args))
    paged_attention_blocks.launch(*args, out=out)
    exact = reference(*row_args(batch, 8))
    assert relative_error(dequantize_blocks(*out)[:11], exact[:11]) < 0.02
    assert not out[0][11:].any() and not out[1][:, 24:].any()


@pytest.mark.interpret
def test_more_columns_than_fit_go_to_the_kernel_for_chunks() -> None:
    batch = batch_of([70, 10], [8, 2], 8, heads=32, kv_heads=2, cache=INT8)
    assert not attention_decode.takes_rows(batch.q, batch.kv_cache, 8)
    check(batch, 8)


@pytest.mark.machine_code(each="cache")
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("heads, sequences, rows", [(32, 1, 8), (32, 32, 8), (32, 64, 4), (32, 1, 2), (64, 8, 8)])
@pytest.mark.parametrize("cache", [INT8, E4M3, BF16], ids=["int8", "e4m3", "bf16"])
def test_the_gluon_kernel_fits(cache: torch.dtype, heads: int, sequences: int, rows: int) -> None:
    """Pages come by TMA, and no value leaves the registers in its loop."""

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    (code,) = compile_launch(
        paged_attention.launch,
        meta(sequences * rows, heads, 128, dtype=BF16),
        meta(*kv_cache_shape(1000, 8, 128), dtype=cache),
        meta(*kv_scales_shape(1000, 8), dtype=FP32) if cache in QUANTIZED_MAX else None,
        meta(sequences, 128, dtype=torch.int32),
        meta(sequences, dtype=torch.int32),
        meta(sequences + 1, dtype=torch.int32),
        0.1,
        False,
        False,
        None,
        None,
        0,
        rows,
        out=(meta(sequences * rows, heads * 128, dtype=BF16),),
        pdl=True,
    )
    assert code.spills == 0 and code.sass["UTMALDG"] > 0 and code.sass["HMMA"] > 0


def drafted(sequences: int, longest: int, rows: int) -> tuple[list[int], list[int]]:
    """Contexts and rows of sequences: all lengths, drafts over the end of a page, none, and some."""
    contexts = [longest, 64, rows, 1, 65, 0, *torch.randint(rows, longest, (sequences,)).tolist()][:sequences]
    wanted = [rows, rows, rows, 1, 2, 0, *torch.randint(1, rows + 1, (sequences,)).tolist()][:sequences]
    return contexts, wanted


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [INT8, E4M3, BF16, FP32], ids=["int8", "e4m3", "bf16", "fp32"])
@pytest.mark.parametrize("sequences, rows", [(1, 2), (1, 4), (1, 8), (7, 8), (32, 8), (64, 4), (128, 2)])
@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (64, 8), (24, 8), (8, 8)])
def test_on_the_gpu(cache: torch.dtype, sequences: int, rows: int, heads: int, kv_heads: int) -> None:
    """Real shapes, picked and in Triton, with and without PDL."""
    dtype = FP32 if cache == FP32 else BF16
    contexts, counts = drafted(sequences, 1200 if cache == FP32 else 5000 if sequences < 32 else 2000, rows)
    options: Any = dict(heads=heads, kv_heads=kv_heads, dim=128, cache=cache, dtype=dtype, device="cuda")
    batch = batch_of(contexts, counts, rows, spare_blocks=40, **options)
    check(batch, rows)
    check(batch, rows, pdl=True)
    check(batch, rows, window=70)
    if rows * heads // kv_heads <= (16 if cache == FP32 else 64):
        check(batch, rows, in_triton)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [INT8, E4M3], ids=["int8", "e4m3"])
@pytest.mark.parametrize("sequences, rows", [(1, 8), (4, 8), (8, 4), (16, 2)])
def test_blocks_on_the_gpu(cache: torch.dtype, sequences: int, rows: int) -> None:
    """Input of decoder_block: same bits twice, near the reference, zeros in padding rows and after the last token."""
    contexts, counts = drafted(sequences, 4000, rows)
    batch = batch_of(contexts, counts, rows, heads=32, kv_heads=8, dim=128, cache=cache, device="cuda")
    q, stored, scales, table, lens, starts, scale, *_ = batch.args()
    args = (q, stored, scales, table, lens, scale, cache, 0, starts, rows)
    results = [tuple(poison(tensor) for tensor in paged_attention_blocks.fake(*args)) for _ in range(2)]
    for out, pdl in zip(results, (False, True), strict=True):
        paged_attention_blocks.launch(*args, out=out, pdl=pdl)
    for one, other in zip(*results, strict=True):
        assert torch.equal(bits(one), bits(other))
    exact = reference(*row_args(batch, rows))
    assert relative_error(dequantize_blocks(*results[0]), exact) < (0.05 if cache == E4M3 else 0.02)
    assert not results[0][1][:, sequences * rows :].any() and not results[0][0][sum(counts) :].float().any()


@pytest.mark.gpu
def test_a_captured_step_follows_lengths_and_drafts() -> None:
    """Lengths, and how many rows each sequence has, live on the device; with PDL after a kernel that writes q."""
    rows = 8
    batch = batch_of([2000, 70, 64, 700], [8, 8, 8, 8], rows, heads=32, kv_heads=8, dim=128, cache=INT8, device="cuda")
    args = row_args(batch, rows)
    out = torch.empty(32, 32 * 128, dtype=BF16, device="cuda")
    paged_attention.launch(*args, out=(out,), pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.q.add_(0.5)
        paged_attention.launch(*args, out=(out,), pdl=True)
    for lengths, counts in (([2000, 70, 64, 700], [8, 1, 3, 8]), ([64, 0, 5, 300], [1, 0, 5, 2])):
        batch.context_lens.copy_(torch.tensor(lengths))
        batch.query_start.copy_(torch.tensor([0, *counts]).cumsum(0))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, reference(*args)) < tolerance(batch)
        assert not out[sum(counts) :].any()


@pytest.mark.gpu
def test_quantized_rows_on_the_gpu() -> None:
    batch = batch_of([3000, 129], [8, 3], 8, heads=32, kv_heads=8, dim=128, cache=INT8, device="cuda")
    _, quantized, scale = paged_attention_quant(*batch.args(), False, INT8, 0, None, None, 0, 8)
    assert relative_error(quantized.float() * scale[:, None], reference(*row_args(batch, 8))) < 0.02
