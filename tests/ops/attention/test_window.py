"""Sliding windows: the reference against transformers' own mask, the kernels against the reference."""

import math
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from sidestream.ops.attention import decode as attention_decode
from sidestream.ops.attention import prefill as attention_prefill
from sidestream.ops.attention.paged_attention import gather_keys_values, paged_attention, paged_attention_quant
from sidestream.ops.attention.paged_attention import paged_attention_reference as reference
from sidestream.ops.attention.paged_attention_blocks import paged_attention_blocks
from sidestream.ops.core.dtypes import QUANTIZED_MAX
from sidestream.ops.core.kv_layout import PAGE_SIZE, kv_cache_shape, kv_scales_shape
from sidestream.ops.core.triton_support import INTERPRETED
from support.attention import Batch, make_batch, relative_error, spills_in_main_loop, tolerance
from support.sm90 import compile_launch

E4M3, INT8, BF16, FP32 = torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32
CACHES = pytest.mark.parametrize("cache", [E4M3, INT8, BF16, FP32], ids=["e4m3", "int8", "bf16", "fp32"])


def transformers_mask(context: int, count: int, window: int) -> torch.Tensor:
    """[count, context] bool: the keys that the last `count` queries see, as transformers has it."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    sees = sliding_window_causal_mask_function(window)
    nothing = torch.tensor(0)
    rows = [
        [bool(sees(nothing, nothing, torch.tensor(query), torch.tensor(key))) for key in range(context)]
        for query in range(context - count, context)
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize("window", [1, 5, 64, 69, 70, 71, 500])
@pytest.mark.parametrize("context, count", [(70, 1), (70, 70), (70, 9)])
def test_the_reference_sees_what_transformers_sees(window: int, context: int, count: int) -> None:
    batch = make_batch([context], [count], heads=2, kv_heads=2, cache=FP32, dtype=FP32)
    keys, values = gather_keys_values(batch.kv_cache, None, batch.block_table[0, : -(-context // PAGE_SIZE)], context)
    want = torch.nn.functional.scaled_dot_product_attention(
        batch.q.transpose(0, 1), keys, values, transformers_mask(context, count, window)
    )
    got = reference(*batch.args(decode=count == 1), window=window)
    assert relative_error(got, want.transpose(0, 1).flatten(1)) < 1e-5
    whole = reference(*batch.args())
    assert torch.equal(got, whole) == (window >= context)


def test_what_lies_before_the_window_is_not_read() -> None:
    batch = make_batch([200], [1], cache=FP32, dtype=FP32)
    want = reference(*batch.args(decode=True), window=60)
    batch.kv_cache[batch.block_table[0, :2].long()] = 1e30
    assert torch.equal(reference(*batch.args(decode=True), window=60), want)


def test_the_other_forms_take_the_window_along() -> None:
    batch = make_batch([7, 130], [1, 1], dim=128, cache=INT8)
    rows = paged_attention(*batch.args(False, True), None, None, 20)
    assert not torch.equal(rows, paged_attention(*batch.args(False, True)))
    kept, *_ = paged_attention_quant(*batch.args(False, True), True, INT8, 0, None, None, 20)
    assert torch.equal(kept, rows)
    in_blocks, scale = paged_attention_blocks(*batch.args()[:5], batch.args()[6], INT8, 20)
    blocks = in_blocks.float().view(2, -1, 128) * scale[:, :2].T[..., None]
    assert relative_error(blocks.flatten(1), rows) < 1e-2


def test_windows_that_mean_nothing_are_named() -> None:
    batch = make_batch([7], [1], cache=BF16)
    with pytest.raises(ValueError, match="window must be a number of tokens"):
        paged_attention(*batch.args(), None, None, -1)


def check_window(batch: Batch, window: int, decode: bool, launch: Optional[Callable[..., None]] = None) -> None:
    """Launch twice into NaNs: same bits, and near the reference in every row."""
    args = (*batch.args(False, decode), None, None, window)
    results = []
    for _ in range(2):
        out = torch.full((len(batch.q), batch.q.shape[1] * batch.q.shape[2]), math.nan, device=batch.q.device)
        results.append(out.to(batch.q.dtype))
        (launch or paged_attention.launch)(*args, out=(results[-1],))
    assert torch.equal(results[0], results[1])
    want = reference(*args)
    assert relative_error(results[0], want) < tolerance(batch)
    for row, (got, right) in enumerate(zip(results[0], want, strict=True)):
        assert relative_error(got, right) < 3 * tolerance(batch) if right.any() else not got.any(), f"row {row}"


def triton_decode(*args: Any, out: Any) -> None:
    *six, _starts, scale, _quantize_q, _decode, _wide, _plan, window = args
    attention_decode.launch_triton(*six, scale, out[0], False, window)


def triton_prefill(*args: Any, out: Any) -> None:
    *nine, _decode, _wide, _plan, window = args
    attention_prefill.launch_triton(*nine, out[0], False, window)


@pytest.mark.interpret
@CACHES
def test_decode_kernel(cache: torch.dtype) -> None:
    """Random lengths around the window and around its pages; short, empty and split sequences."""
    dtype = FP32 if cache == FP32 else BF16
    for window in (1, int(torch.randint(2, 200, ()))):
        near = (torch.randint(-3, 4, (3,)) + window).clamp_min(1).tolist()
        batch = make_batch([1, 0, 129, 400, *near], [1] * 7, heads=3, kv_heads=1, cache=cache, dtype=dtype)
        check_window(batch, window, True, triton_decode)
    batch.block_table = batch.block_table[:, :3].contiguous()  # no room for splits
    batch.context_lens.clamp_max_(190)
    batch.contexts = batch.context_lens.tolist()
    check_window(batch, window, True, triton_decode)


@pytest.mark.interpret
@CACHES
def test_prefill_kernel(cache: torch.dtype) -> None:
    """Chunks shorter and longer than the window, with and without history, single rows and padding rows."""
    dtype = FP32 if cache == FP32 else BF16
    for window in (64, int(torch.randint(2, 150, ()))):
        count = max(1, window + int(torch.randint(-3, 4, ())))
        batch = make_batch(
            [40, 0, 150, 189, count],
            [40, 1, 1, 50, count],
            heads=6,
            kv_heads=2,
            cache=cache,
            dtype=dtype,
            padding=5,
        )
        check_window(batch, window, False, triton_prefill)


@pytest.mark.machine_code(each="decode")
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("cache", [INT8, E4M3, BF16])
@pytest.mark.parametrize("decode", [True, False])
def test_windowed_kernels_fit(cache: torch.dtype, decode: bool) -> None:
    """Decode spills nothing; where chunks have a Gluon kernel, it is taken, and its main loop spills next to nothing.
    Another window is the same code with another number."""

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    sequences, tokens = 8, 8 if decode else 1000
    scales = meta(*kv_scales_shape(1000, 8), dtype=FP32) if cache in QUANTIZED_MAX else None
    tables = [meta(*shape, dtype=torch.int32) for shape in ((sequences, 128), (sequences,), (sequences + 1,))]
    arguments = (
        meta(tokens, 32, 128, dtype=BF16),
        meta(*kv_cache_shape(1000, 8, 128), dtype=cache),
        scales,
        *tables,
        0.1,
        cache == E4M3,
        decode,
        None,
        None,
        4096,
    )
    (code,) = compile_launch(paged_attention.launch, *arguments, out=(meta(tokens, 4096, dtype=BF16),))
    in_gluon = decode or cache != BF16
    assert (code.sass["UTMALDG"] > 0) == in_gluon
    assert spills_in_main_loop(code) <= 24 if in_gluon and not decode else code.spills == 0


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("launch", [None, triton_decode], ids=["picked", "triton"])
def test_decode_on_the_gpu(cache: torch.dtype, launch: Optional[Callable[..., None]]) -> None:
    """Mistral 7B's heads and window, and small ones."""
    options: Any = dict(heads=32, kv_heads=8, dim=128, cache=cache, dtype=FP32 if cache == FP32 else BF16)
    for window, contexts in (
        (4096, [9000, 4095, 4096, 4097, 4160, 1, 0, 12345]),
        (4096, [9001]),
        (100, [99, 100, 101, 128, 164, 165, 5000, 0] * 40),
        (1, [1, 64, 65, 700]),
    ):
        batch = make_batch(contexts, [1] * len(contexts), device="cuda", spare_blocks=40, **options)
        check_window(batch, window, True, launch)


@pytest.mark.gpu
@CACHES
@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (28, 4), (8, 8)])
@pytest.mark.parametrize("launch", [None, triton_prefill], ids=["picked", "triton"])
def test_prefill_on_the_gpu(
    cache: torch.dtype, heads: int, kv_heads: int, launch: Optional[Callable[..., None]]
) -> None:
    """Chunks with and without history, decode rows and padding rows among them."""
    options: Any = dict(heads=heads, kv_heads=kv_heads, dim=128, cache=cache, dtype=FP32 if cache == FP32 else BF16)
    for window in (1, 100, 128, 1000, 2047, 4096):
        batch = make_batch(
            [1500, 1, 5000, 300, 0, 4097, 129], [1500, 1, 700, 1, 1, 1, 128], device="cuda", padding=50, **options
        )
        check_window(batch, window, False, launch)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [E4M3, INT8])
def test_forms_and_pdl_on_the_gpu(cache: torch.dtype) -> None:
    """The quantizing forms with PDL, replayed from a graph with other lengths."""
    batch = make_batch([2000, 601, 640, 700], [1] * 4, heads=32, kv_heads=8, dim=128, cache=cache, device="cuda")
    tables, scale = batch.args()[:5], batch.args()[6]
    out = tuple(torch.zeros_like(each) for each in paged_attention_blocks.fake(*tables, scale, cache))
    rows = torch.empty(4, 4096, dtype=BF16, device="cuda")
    args = (*batch.args(False, True), None, None, 600)
    paged_attention.launch(*args, out=(rows,), pdl=True)
    paged_attention_blocks.launch(*tables, scale, cache, 600, out=out, pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.q.add_(0.5)
        paged_attention.launch(*args, out=(rows,), pdl=True)
        paged_attention_blocks.launch(*tables, scale, cache, 600, out=out, pdl=True)
    for lengths in ([2000, 601, 640, 700], [601, 600, 599, 0]):
        batch.context_lens.copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        want = reference(*args)
        assert relative_error(rows, want) < tolerance(batch)
        blocks = out[0].float().view(4, -1, 128) * out[1][:, :4].T[..., None]
        assert relative_error(blocks.flatten(1), want) < 0.04
