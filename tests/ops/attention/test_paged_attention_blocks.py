"""paged_attention_blocks: attention, then quantize_blocks; the kernel that does both against that."""

from typing import Any

import pytest
import torch
from sidestream.ops.attention.paged_attention import paged_attention
from sidestream.ops.attention.paged_attention_blocks import paged_attention_blocks
from sidestream.ops.core.dtypes import QUANTIZED_MAX
from sidestream.ops.core.kv_layout import kv_cache_shape, kv_scales_shape
from sidestream.ops.elementwise.quantize_blocks import dequantize_blocks, quantize_blocks
from support.checks import bits, poison

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def inputs(
    lengths: list[int], heads: int = 8, kv_heads: int = 2, dim: int = 128, dtype: torch.dtype = FP8, device: str = "cpu"
) -> tuple[Any, ...]:
    blocks = max(1, -(-max(lengths) // 64))
    pages = len(lengths) * blocks
    cache = torch.randn(kv_cache_shape(pages, kv_heads, dim), device=device).to(dtype)
    scales = None if dtype == BF16 else torch.rand(kv_scales_shape(pages, kv_heads), device=device) * 0.5 + 0.5
    table = torch.randperm(pages).view(len(lengths), blocks).to(device=device, dtype=torch.int32)
    q = torch.randn(len(lengths), heads, dim, device=device).to(BF16)
    return q, cache, scales, table, torch.tensor(lengths, dtype=torch.int32, device=device), dim**-0.5


def test_it_is_attention_then_quantization() -> None:
    q, cache, scales, table, lengths, scale = args = inputs([70, 0, 3])
    starts = torch.arange(4, dtype=torch.int32)
    want = quantize_blocks(paged_attention(q, cache, scales, table, lengths, starts, scale, False, True))
    for got, right in zip(paged_attention_blocks(*args), want, strict=True):
        assert torch.equal(got.float(), right.float())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [{}, {"dtype": BF16}, {"heads": 32, "kv_heads": 8}, {"dim": 64, "heads": 4}, {"heads": 6, "kv_heads": 2}],
    ids=str,
)
@pytest.mark.parametrize(
    "lengths", [[200], [1, 0, 1000], [5000, 64, 65], [77] * 64], ids=["one", "empty", "ragged", "many"]
)
@pytest.mark.parametrize("stored", [FP8, torch.int8], ids=str)
def test_kernel_on_the_gpu(case: dict[str, Any], lengths: list[int], stored: torch.dtype) -> None:
    args = inputs(lengths, device="cuda", **case)
    if args[0].shape[1] * args[0].shape[2] % 128:
        pytest.skip("no whole blocks")
    q, cache, scales, table, lens, scale = args
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda")
    args = (*args, stored)
    exact = paged_attention.reference(q, cache, scales, table, lens, starts, scale, False, True).float()
    first, second = (launch(args, pdl) for pdl in (False, True))
    for got, again, want in zip(first, second, paged_attention_blocks.reference(*args), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert torch.equal(bits(got), bits(again)), "other bits at a second launch"
    largest = exact.view(len(lengths), -1, 128).abs().amax(-1)
    torch.testing.assert_close(
        first[1][:, : len(lengths)], largest.t().clamp_min(1e-12) / QUANTIZED_MAX[stored], rtol=1e-2, atol=1e-9
    )
    assert (first[1][:, len(lengths) :] == 0).all()
    # e4m3 rounds by 1 / 16 of a value at most, int8 by 1 / 254 of the largest, the kernel before it by a hundredth of
    # what is typical for a head
    coarse, fine = (exact.abs() / 16, 0.01) if stored == FP8 else (0.0, 0.015)
    error, bound = (dequantize_blocks(*first) - exact).abs(), coarse + fine * largest.repeat_interleave(128, 1) + 1e-6
    assert (error <= bound).all(), f"off by {float((error - bound).max())} more than rounding explains"


def launch(args: tuple[Any, ...], pdl: bool) -> tuple[torch.Tensor, ...]:
    out = tuple(poison(tensor) for tensor in paged_attention_blocks.fake(*args))
    paged_attention_blocks.launch(*args, out=out, pdl=pdl)
    torch.cuda.synchronize()
    return out
