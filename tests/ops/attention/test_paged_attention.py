"""Paged attention: the reference against torch's own attention, the kernels against the reference."""

import math
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from sidestream.ops.attention import decode as attention_decode
from sidestream.ops.attention import prefill as attention_prefill
from sidestream.ops.attention.paged_attention import (
    gather_keys_values,
    paged_attention,
    paged_attention_quant,
)
from sidestream.ops.attention.paged_attention import paged_attention_reference as reference
from sidestream.ops.core.dtypes import QUANTIZED_MAX
from sidestream.ops.core.kv_layout import KEY, PAGE_SIZE, VALUE, kv_cache_shape, kv_scales_shape
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.ops.elementwise.quantize import reference as quantize_rowwise_reference
from support.attention import Batch, make_batch, relative_error, spills_in_main_loop, tolerance
from support.sm90 import MachineCode, compile_launch, reads_under_way

E4M3, INT8, BF16, FP32 = torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32


def sdpa(batch: Batch, quantize_q: bool = False) -> torch.Tensor:
    """The same attention by torch's scaled_dot_product_attention on contiguous keys and values, fp32."""
    tokens, heads, dim = batch.q.shape
    out = torch.zeros(tokens, heads, dim)
    queries = batch.q.float()
    if quantize_q:
        rounded, scale = quantize_rowwise_reference(batch.q)
        queries = rounded.float() * scale[..., None]
    first = 0
    for sequence, (context, count) in enumerate(zip(batch.contexts, batch.counts, strict=True)):
        if context and count:
            pages = batch.block_table[sequence, : -(-context // PAGE_SIZE)].long()
            keys, values = gather_keys_values(batch.kv_cache, batch.kv_scales, pages, context)
            group = heads // keys.shape[0]
            mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)
            out[first : first + count] = torch.nn.functional.scaled_dot_product_attention(
                queries[first : first + count].transpose(0, 1),
                keys.repeat_interleave(group, 0),
                values.repeat_interleave(group, 0),
                mask,
            ).transpose(0, 1)
        first += count
    return out.reshape(tokens, heads * dim)


def check_launch(batch: Batch, quantize_q: bool, decode: bool, launch: Optional[Callable[..., None]] = None) -> float:
    """Launch twice into NaNs: same bits, no NaN left, zeros where promised; the relative error against the
    reference.
    """
    args = batch.args(quantize_q, decode)
    results = []
    for _ in range(2):
        out = torch.full(
            (batch.q.shape[0], batch.q.shape[1] * batch.q.shape[2]),
            math.nan,
            dtype=batch.q.dtype,
            device=batch.q.device,
        )
        (launch or paged_attention.launch)(*args, out=(out,))
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert not results[0].isnan().any()
    want = reference(*args)
    owner = torch.repeat_interleave(torch.tensor(batch.contexts), torch.tensor(batch.counts))
    idle = torch.ones(batch.q.shape[0], dtype=torch.bool)
    idle[: len(owner)] = owner == 0
    assert not results[0][idle.to(batch.q.device)].any()
    worst = max(
        (
            relative_error(row, reference_row)
            for row, reference_row in zip(results[0], want, strict=True)
            if reference_row.any()
        ),
        default=0.0,
    )
    assert worst < 3 * tolerance(batch)
    return relative_error(results[0], want)


def triton_decode(
    q: Any,
    kv_cache: Any,
    kv_scales: Any,
    table: Any,
    lens: Any,
    starts: Any,
    scale: float,
    quantize_q: bool,
    decode: bool,
    *,
    out: Any,
) -> None:
    attention_decode.launch_triton(q, kv_cache, kv_scales, table, lens, scale, out[0], False)


def triton_prefill(*args: Any, out: Any) -> None:
    attention_prefill.launch_triton(*args[:-1], out[0], False)


CACHES = pytest.mark.parametrize("cache", [E4M3, INT8, BF16, FP32], ids=["e4m3", "int8", "bf16", "fp32"])


@CACHES
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (8, 1)])
def test_reference_is_torch_attention(cache: torch.dtype, heads: int, kv_heads: int) -> None:
    batch = make_batch(
        [1, 64, 65, 200], [1, 3, 65, 70], heads=heads, kv_heads=kv_heads, cache=cache, dtype=FP32, padding=3
    )
    assert relative_error(reference(*batch.args()), sdpa(batch)) < 1e-5
    if cache == E4M3:
        assert relative_error(reference(*batch.args(quantize_q=True)), sdpa(batch, quantize_q=True)) < 1e-5
        assert 1e-3 < relative_error(reference(*batch.args(quantize_q=True)), sdpa(batch)) < 0.1


def test_reference_decode_ignores_quantize_q() -> None:
    batch = make_batch([5, 130], [1, 1], cache=E4M3)
    assert torch.equal(reference(*batch.args(True, True)), reference(*batch.args(False, True)))


def test_rows_of_nobody_are_zero() -> None:
    batch = make_batch([7, 0, 70], [2, 1, 3], padding=4)
    out = paged_attention(*batch.args())
    assert not out[2].any() and not out[6:].any()
    assert out[:2].any() and out[3:6].any()


@pytest.mark.parametrize("keep", [True, False])
def test_quant_is_the_quantized_result(keep: bool) -> None:
    batch = make_batch([7, 70], [2, 3], cache=E4M3, padding=1)
    out, quantized, scale = paged_attention_quant(*batch.args(), keep)
    want = paged_attention(*batch.args())
    assert out.shape == (6 if keep else 0, 256)
    if keep:
        assert torch.equal(out, want)
    want_quantized, want_scale = quantize_rowwise_reference(want)
    assert torch.equal(quantized.view(torch.uint8), want_quantized.view(torch.uint8)) and torch.equal(scale, want_scale)


def test_arguments_that_do_not_fit_are_named() -> None:
    batch = make_batch([7], [1], cache=E4M3)
    args = list(batch.args())
    with pytest.raises(ValueError, match="kv_scales"):
        paged_attention(*args[:2], None, *args[3:])
    with pytest.raises(ValueError, match="kv_cache"):
        paged_attention(batch.q[..., :32].contiguous(), *args[1:])
    with pytest.raises(ValueError, match="heads"):
        paged_attention(batch.q[:, :3].contiguous(), *args[1:])


def compiled(
    tokens: int,
    sequences: int,
    cache: torch.dtype,
    launch: Callable[..., None],
    quantize_q: bool,
    decode: bool,
    dim: int = 128,
) -> MachineCode:
    """The machine code for 32 query and 8 KV heads."""

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    scales = meta(*kv_scales_shape(1000, 8), dtype=FP32) if cache in QUANTIZED_MAX else None
    tables = (
        meta(sequences, 128, dtype=torch.int32),
        meta(sequences, dtype=torch.int32),
        meta(sequences + 1, dtype=torch.int32),
    )
    q, out = meta(tokens, 32, dim, dtype=BF16), meta(tokens, 32 * dim, dtype=BF16)
    (code,) = compile_launch(
        launch,
        q,
        meta(*kv_cache_shape(1000, 8, dim), dtype=cache),
        scales,
        *tables,
        0.1,
        quantize_q,
        decode,
        out=(out,),
    )
    return code


@pytest.mark.machine_code(each="launch")
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("cache, quantize_q", [(E4M3, True), (E4M3, False), (INT8, False), (BF16, False)])
@pytest.mark.parametrize("launch", [paged_attention.launch, triton_prefill], ids=["picked", "triton"])
def test_prefill_uses_hoppers_tensor_cores(cache: torch.dtype, quantize_q: bool, launch: Callable[..., None]) -> None:
    """The Gluon kernel loads pages by TMA and supports 8-bit caches; 16-bit caches use the Triton kernel."""
    code = compiled(1000, 8, cache, launch, quantize_q, False)
    in_triton = launch is triton_prefill or cache == BF16
    assert code.spills == 0 if in_triton else spills_in_main_loop(code) <= 1
    assert code.sass["HGMMA"] > 0 and code.sass["HMMA"] == 0
    assert (code.sass["QGMMA"] > 0) == quantize_q
    assert (code.sass["UTMALDG"] > 0) == (not in_triton)
    assert reads_under_way(code) == []


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("cache, dim", [(E4M3, 128), (INT8, 64), (BF16, 64)])
def test_triton_decode_uses_hoppers_tensor_cores(cache: torch.dtype, dim: int) -> None:
    code = compiled(8, 8, cache, triton_decode, False, True, dim)
    assert code.spills == 0
    assert code.sass["HGMMA"] > 0 and code.sass["HMMA"] == 0


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("sequences", [1, 8, 64])
@pytest.mark.parametrize("cache", [E4M3, INT8, BF16])
def test_gluon_decode_is_picked_and_fits(cache: torch.dtype, sequences: int) -> None:
    """Pages come by TMA; a batch that fills the GPU has four programs of two warps on an SM (two with a bf16 cache)."""
    code = compiled(sequences, sequences, cache, paged_attention.launch, False, True)
    assert code.spills == 0 and code.sass["UTMALDG"] > 0 and code.sass["HMMA"] > 0
    assert reads_under_way(code) == []
    if sequences == 64:
        assert code.shared_bytes * (2 if cache == BF16 else 4) <= 227 * 1024 and code.registers <= 160


@pytest.mark.interpret
@CACHES
@pytest.mark.parametrize("heads, kv_heads, dim", [(3, 1, 64), (2, 2, 128)])
def test_decode_kernel(cache: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Whole, split and empty sequences."""
    dtype = FP32 if cache == FP32 else BF16
    batch = make_batch([1, 65, 0, 300], [1] * 4, heads=heads, kv_heads=kv_heads, dim=dim, cache=cache, dtype=dtype)
    assert check_launch(batch, False, True, triton_decode) < tolerance(batch)


@pytest.mark.interpret
def test_decode_kernel_without_splits() -> None:
    batch = make_batch([130, 64, 0], [1] * 3, heads=16, kv_heads=1, cache=E4M3)
    batch.block_table = batch.block_table[:, :3].contiguous()
    assert check_launch(batch, False, True, triton_decode) < tolerance(batch)


@pytest.mark.interpret
@CACHES
@pytest.mark.parametrize("heads, kv_heads, dim", [(3, 1, 64), (2, 2, 128)])
def test_prefill_kernel(cache: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Chunks without and with history, single rows among them, an empty sequence, padding rows."""
    dtype = FP32 if cache == FP32 else BF16
    batch = make_batch(
        [40, 0, 150, 129], [40, 1, 1, 70], heads=heads, kv_heads=kv_heads, dim=dim, cache=cache, dtype=dtype, padding=45
    )
    assert check_launch(batch, False, False) < tolerance(batch)
    if cache == E4M3:
        assert check_launch(batch, True, False) < 2 * tolerance(batch)


@pytest.mark.interpret
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_quant_launch(decode: bool, keep: bool) -> None:
    batch = make_batch([70, 130], [1, 1], cache=E4M3)
    args = (*batch.args(False, decode), keep)
    out = torch.full((2 if keep else 0, 256), math.nan, dtype=BF16)
    quantized, scale = torch.zeros(2, 256, dtype=E4M3), torch.full((2,), math.nan)
    paged_attention_quant.launch(*args, out=(out, quantized, scale))
    want = paged_attention(*args[:-1])
    if keep:
        assert relative_error(out, want) < tolerance(batch)
    assert relative_error(quantized.float() * scale[:, None], want) < 0.04


def ragged(count: int, longest: int) -> list[int]:
    return [1, longest, 64, 65, *torch.randint(1, longest, (count,)).tolist()][:count] if count > 1 else [longest]


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("sequences", [1, 8, 64, 256])
@pytest.mark.parametrize("launch", [None, triton_decode], ids=["picked", "triton"])
def test_decode_on_the_gpu(cache: torch.dtype, sequences: int, launch: Optional[Callable[..., None]]) -> None:
    dtype = FP32 if cache == FP32 else BF16
    batch = make_batch(
        ragged(sequences, 1500 if cache == FP32 else 4096),
        [1] * sequences,
        heads=32,
        kv_heads=8,
        dim=128,
        cache=cache,
        dtype=dtype,
        spare_blocks=60,
        device="cuda",
    )
    if sequences > 4:
        batch.context_lens[3], batch.contexts[3] = 0, 0
    assert check_launch(batch, False, True, launch) < tolerance(batch)


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (32, 8, 64), (24, 8, 128), (8, 8, 128), (16, 1, 64)])
def test_heads_on_the_gpu(cache: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Every group width and head_dim: decode, then chunks with history among decode rows, with padding rows."""
    dtype = FP32 if cache == FP32 else BF16
    options: Any = dict(heads=heads, kv_heads=kv_heads, dim=dim, cache=cache, dtype=dtype, device="cuda")
    batch = make_batch([1, 700, 128, 0, 63], [1] * 5, **options)
    assert check_launch(batch, False, True) < tolerance(batch)
    batch = make_batch([512, 1, 1000, 300, 0, 129, 128], [512, 1, 200, 1, 1, 128, 1], padding=100, **options)
    for launch in (None, triton_prefill):
        assert check_launch(batch, False, False, launch) < tolerance(batch)
        if cache == E4M3:
            assert check_launch(batch, True, False, launch) < 2 * tolerance(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [E4M3, INT8, BF16])
def test_many_tiles_on_the_gpu(cache: torch.dtype) -> None:
    """More tiles than SMs, so that programs go from tile to tile with their rings in mid-turn; odd pages, short
    ends, a long history.
    """
    counts = [1000, 1, 17, 640, 0, 333, 2000]
    batch = make_batch(
        [1000, 700, 17, 4000, 64, 334, 2129],
        counts,
        heads=32,
        kv_heads=8,
        dim=128,
        cache=cache,
        padding=30,
        device="cuda",
    )
    assert check_launch(batch, cache == E4M3, False) < 2 * tolerance(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [E4M3, INT8])
def test_scales_of_every_size(cache: torch.dtype) -> None:
    """Scales go into fp16 with the values: tiny and large keys and values stay right next to each other."""
    batch = make_batch([900, 300], [200, 300], heads=32, kv_heads=8, dim=128, cache=cache, device="cuda")
    assert batch.kv_scales is not None
    batch.kv_scales[:, :, VALUE] *= torch.tensor([1e-3, 1.0, 300.0, 0.05], device="cuda").repeat(16)
    batch.kv_scales[:, :, KEY] *= torch.tensor([0.01, 1.0, 2.0, 0.1], device="cuda").repeat(16)
    assert check_launch(batch, False, False) < 2 * tolerance(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("sequences", [3, 64])
def test_quant_on_the_gpu(decode: bool, sequences: int) -> None:
    batch = make_batch(
        ragged(sequences, 2000), [1] * sequences, heads=32, kv_heads=8, dim=128, cache=E4M3, device="cuda"
    )
    o, quantized, scale = paged_attention_quant(*batch.args(False, decode), True)
    assert relative_error(o, reference(*batch.args(False, decode))) < tolerance(batch)
    want, want_scale = quantize_rowwise_reference(o)
    assert relative_error(scale, want_scale) < 1e-6
    assert relative_error(quantized.float() * scale[:, None], want.float() * want_scale[:, None]) < 1e-2
    again = paged_attention_quant(*batch.args(False, decode), False)
    assert torch.equal(again[1].view(torch.uint8), quantized.view(torch.uint8)) and torch.equal(again[2], scale)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [E4M3, INT8])
def test_a_captured_decode_follows_the_lengths(cache: torch.dtype) -> None:
    """Lengths and tables live on the device: a captured graph is right for others too, empty sequences among them,
    with PDL on.
    """
    options: Any = dict(heads=32, kv_heads=8, dim=128, cache=cache, device="cuda")
    batch = make_batch([2000, 5, 64, 700], [1] * 4, **options)
    args = batch.args(False, True)
    out = torch.empty(4, 32 * 128, dtype=BF16, device="cuda")
    paged_attention.launch(*args, out=(out,), pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            batch.q.add_(0.5)
            paged_attention.launch(*args, out=(out,), pdl=True)
    for lengths in ([2000, 5, 64, 700], [64, 0, 1, 300], [1999, 3, 0, 0]):
        batch.context_lens.copy_(torch.tensor(lengths))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, reference(*args)) < tolerance(batch)
        assert not out[torch.tensor(lengths) == 0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("quantize_q", [True, False])
def test_prefill_after_a_kernel_with_pdl(quantize_q: bool) -> None:
    batch = make_batch([512, 300], [200, 300], heads=32, kv_heads=8, dim=128, cache=E4M3, device="cuda")
    source, out = batch.q.clone(), torch.empty(500, 4096, dtype=BF16, device="cuda")
    batch.q.zero_()
    batch.q.copy_(source)
    paged_attention.launch(*batch.args(quantize_q), out=(out,), pdl=True)
    assert relative_error(out, reference(*batch.args(quantize_q))) < 2 * tolerance(batch)
