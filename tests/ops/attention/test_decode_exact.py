"""Decode attention with `exact`: a sequence has the same bits alone, in a batch, and for every length of the others."""

from typing import Any

import pytest
import torch
from sidestream.ops.attention import decode, decode_exact
from sidestream.ops.attention.numerics import chunk_pages
from sidestream.ops.attention.paged_attention import paged_attention
from sidestream.ops.attention.paged_attention import paged_attention_reference as reference
from sidestream.ops.core.kv_layout import kv_cache_shape, kv_scales_shape
from sidestream.ops.core.triton_support import INTERPRETED, cdiv
from support.attention import Batch, make_batch, relative_error, tolerance
from support.checks import bits, poison
from support.sm90 import compile_launch, reads_under_way

INT8, BF16, FP32 = torch.int8, torch.bfloat16, torch.float32


def exact_args(batch: Any, window: int = 0) -> tuple[Any, ...]:
    return (*batch.args(decode=True), None, None, window, 0, True)


def alone(args: tuple[Any, ...], sequence: int) -> tuple[Any, ...]:
    """The same arguments for one of the sequences."""
    q, cache, scales, table, lens, starts, *rest = args
    one = slice(sequence, sequence + 1)
    return (q[one], cache, scales, table[one], lens[one], starts[:2], *rest)


def launched(args: tuple[Any, ...], pdl: bool = False) -> torch.Tensor:
    out = poison(paged_attention.fake(*args))
    paged_attention.launch(*args, out=(out,), pdl=pdl)
    return out


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(bits(got), bits(want))


def test_chunks_do_not_depend_on_the_table_up_to_512_pages() -> None:
    assert {chunk_pages(blocks) for blocks in range(1, 513)} == {8}
    assert all(cdiv(blocks, chunk_pages(blocks)) <= 64 for blocks in (513, 2048, 4097))


@pytest.mark.interpret
@pytest.mark.parametrize("window", [0, 100])
def test_in_triton_sequences_are_the_same_alone_and_near_the_reference(window: int) -> None:
    """Of one chunk of 512 tokens, of several, of none, and of whole ones."""
    batch = make_batch([700, 1, 512, 0, 1100, 513], [1] * 6, cache=INT8)
    args = exact_args(batch, window)
    together = launched(args)
    want = reference(*args)
    assert relative_error(together, want) < 3 * tolerance(batch)
    for sequence in range(6):
        assert same(launched(alone(args, sequence))[0], together[sequence])


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("sequences, window", [(1, 0), (256, 100)])
def test_the_gluon_kernel_fits(sequences: int, window: int) -> None:
    """Pages come by TMA, and four programs of two warps fit on an SM."""

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    (code,) = compile_launch(
        paged_attention.launch,
        meta(sequences, 32, 128, dtype=BF16),
        meta(*kv_cache_shape(1000, 8, 128), dtype=INT8),
        meta(*kv_scales_shape(1000, 8), dtype=FP32),
        meta(sequences, 128, dtype=torch.int32),
        meta(sequences, dtype=torch.int32),
        meta(sequences + 1, dtype=torch.int32),
        *(0.1, False, True, None, None, window, 0, True),
        out=(meta(sequences, 4096, dtype=BF16),),
        pdl=True,
    )
    assert code.spills <= 4 and code.sass["UTMALDG"] > 0 and code.sass["HMMA"] > 0
    assert code.shared_bytes * 4 <= 227 * 1024 and code.registers * 64 * 4 <= 65536
    assert reads_under_way(code) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dim, heads, kv_heads", [(128, 32, 8), (128, 4, 4), (128, 24, 8), (64, 9, 3), (128, 32, 2)])
@pytest.mark.parametrize("window", [0, 700])
def test_on_the_gpu(dim: int, heads: int, kv_heads: int, window: int) -> None:
    """A sequence has its bits alone, among 8 and among 64 ragged ones, with and without PDL."""
    contexts = [4096, 4090, 1, 64, 512, 513, 0, 1100, *torch.randint(1, 3000, (56,)).tolist()]
    batch = make_batch(
        contexts, [1] * 64, heads=heads, kv_heads=kv_heads, dim=dim, cache=INT8, spare_blocks=40, device="cuda"
    )
    args = exact_args(batch, window)
    together = launched(args)
    assert same(launched(args, pdl=True), together)
    want = reference(*args)
    for row in range(12):
        assert (
            relative_error(together[row], want[row]) < 3 * tolerance(batch)
            if contexts[row]
            else (not together[row].any())
        )
    q, cache, scales, table, lens, starts, *rest = args
    few = (q[:8], cache, scales, table[:8], lens[:8], starts[:9], *rest)
    assert same(launched(few), together[:8])
    for sequence in (0, 1, 2, 4, 5, 7, 20):
        assert same(launched(alone(args, sequence))[0], together[sequence]), f"{contexts[sequence]} tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 5, 64])
def test_programs_per_sequence_do_not_matter(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    batch = make_batch([5000, 600, 2048], [1] * 3, heads=32, kv_heads=8, dim=128, cache=INT8, device="cuda")
    args = exact_args(batch)
    expected = launched(args)
    tiling = decode_exact.tiling
    monkeypatch.setattr(decode_exact, "tiling", lambda *given: tiling(*given)._replace(splits=splits))
    assert same(launched(args), expected)


def attend(batch: Batch, parts: list[tuple[int, int]]) -> torch.Tensor:
    """Attention of chunks (begin, end) of a prompt, as sequences of one step."""
    q, cache, scales, table, _, _, scale, *_ = batch.args()
    ends = torch.tensor([end for _, end in parts], dtype=torch.int32, device=q.device)
    starts = torch.tensor([0, *(end - begin for begin, end in parts)], device=q.device).cumsum(0).int()
    rows = torch.cat([q[begin:end] for begin, end in parts])
    args = (rows, cache, scales, table.expand(len(parts), -1).contiguous(), ends, starts, scale, False, False)
    return launched((*args, None, None, 0, 0, True))


def check_chunks(batch: Batch, length: int, sizes: tuple[int, ...]) -> None:
    whole = attend(batch, [(0, length)])
    for size in sizes:
        parts = [(begin, min(length, begin + size)) for begin in range(0, length, size)]
        assert same(attend(batch, parts), whole), f"chunks of {size} in one step"
        begin, end = parts[len(parts) // 2]
        assert same(attend(batch, [(begin, end)]), whole[begin:end]), f"a chunk of {size} alone"


@pytest.mark.interpret
def test_chunks_of_a_prompt_have_the_bits_of_one_in_triton() -> None:
    check_chunks(make_batch([150], [150], heads=3, kv_heads=1, dim=64, cache=INT8), 150, (17, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dim, heads, kv_heads", [(128, 32, 8), (64, 9, 3), (64, 4, 2), (128, 24, 8)])
def test_chunks_of_a_prompt_have_the_bits_of_one(dim: int, heads: int, kv_heads: int) -> None:
    """In chunks of 1 to 2,048 tokens, alone and next to other sequences."""
    batch = make_batch([2048], [2048], heads=heads, kv_heads=kv_heads, dim=dim, cache=INT8, device="cuda")
    check_chunks(batch, 2048, (1, 5, 17, 64, 100, 300, 1000))


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("exact", [False, True])
def test_the_triton_kernel_for_chunks_rounds_every_product(exact: bool) -> None:
    """With fused multiply-adds its loops with and without a mask would round differently."""

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    (code,) = compile_launch(
        paged_attention.launch,
        meta(100, 9, 64, dtype=BF16),
        meta(*kv_cache_shape(1000, 3, 64), dtype=INT8),
        meta(*kv_scales_shape(1000, 3), dtype=FP32),
        meta(8, 128, dtype=torch.int32),
        meta(8, dtype=torch.int32),
        meta(9, dtype=torch.int32),
        *(0.1, False, False, None, None, 0, 0, exact),
        out=(meta(100, 576, dtype=BF16),),
    )
    assert (code.sass["FFMA"] == 0) == exact


def test_the_triton_kernel_is_chosen_for_other_heads() -> None:
    """The Gluon kernel has 8 columns."""
    batch = make_batch([70], [1], heads=32, kv_heads=2, dim=128, cache=INT8)
    assert not decode.decode_gluon.fits(batch.q, batch.kv_cache)
