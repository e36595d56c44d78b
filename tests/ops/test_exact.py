"""Ops of an exact engine give a row the same bits in launches of every size: the rows next to it, their number, and the
kernel that their number chooses do not matter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sidestream.compiler.program.specialize import DECODE_TOKENS, PROMPT_TOKENS
from sidestream.ops.attention.rope_append import rope_append
from sidestream.ops.core.kv_layout import kv_cache_shape, kv_scales_shape
from sidestream.ops.core.registry import as_outputs
from sidestream.ops.elementwise.quantize import quantize_rowwise
from sidestream.ops.elementwise.rms_norm import add_rms_norm_quant, rms_norm_quant
from sidestream.ops.elementwise.silu_mul import silu_mul_quant
from sidestream.ops.linear.linear_8bit import linear_8bit
from sidestream.ops.lora.expand import lora_expand
from sidestream.ops.lora.plan import lora_splits, lora_tile
from sidestream.ops.lora.shrink import lora_shrink
from sidestream.runtime.worker.sampler import Sampler
from support.checks import bits, poison
from support.lora import lora_case

BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
SIZES = (1, 2, 8, 16, 17, 64, 65, 128, 129, 256, 512, 513, 2048)
MOST = 2048

pytestmark = pytest.mark.gpu


def launched(op: Any, *args: Any, pdl: bool = True) -> tuple[torch.Tensor, ...]:
    out = tuple(poison(each) for each in as_outputs(op.fake(*args)))
    op.launch(*args, out=out, pdl=pdl)
    return out


def check(run: Callable[[slice], tuple[torch.Tensor, ...]], sizes: tuple[int, ...] = SIZES) -> None:
    """`run` returns rows of its results for a slice of the rows of its arguments."""
    whole = run(slice(0, MOST))
    for size in sizes:
        first = (size * 7) % (MOST - size + 1)
        for name, (got, want) in enumerate(zip(run(slice(first, first + size)), whole, strict=True)):
            if len(want):
                same = torch.equal(bits(got), bits(want[first : first + size]))
                assert same, f"result {name}, {size} rows from {first} on"


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("n, k", [(6144, 4096), (4096, 14336), (1032, 512), (576, 1536)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_linears(n: int, k: int, dtype: torch.dtype) -> None:
    """All kernels that a number of rows chooses; exact engines add deltas and residuals in other ops."""
    q, weight = (torch.randint(-127, 128, (rows, k), device="cuda", dtype=INT8) for rows in (MOST, n))
    scale, weight_scale = (torch.rand(rows, device="cuda") / k**0.5 for rows in (MOST, n))
    check(lambda rows: launched(linear_8bit, q[rows], scale[rows], weight, weight_scale, None, None, dtype))


@pytest.mark.parametrize("width", [256, 1536, 8192, 14336, 18432])
@pytest.mark.parametrize("keep", [False, True])
def test_silu_mul_quant(width: int, keep: bool) -> None:
    gate_up, delta = randn(MOST, 2 * width), randn(MOST, 2 * width)
    check(lambda rows: launched(silu_mul_quant, gate_up[rows], delta[rows], keep, INT8, 128, True))
    # rows without an adapter have the bits of a program without LoRA
    zeros = torch.zeros_like(delta)
    whole = launched(silu_mul_quant, gate_up, None, keep, INT8, 128, True)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(
        launched(silu_mul_quant, gate_up, zeros, keep, INT8, 128, True), whole, strict=True))  # fmt: skip


@pytest.mark.parametrize("width", [512, 4096, 5120])
def test_norms(width: int) -> None:
    x, delta, residual, gain = randn(MOST, width), randn(MOST, width), randn(MOST, width, dtype=FP16), randn(width)
    check(lambda rows: launched(rms_norm_quant, residual[rows], gain, 1e-5, False, INT8, 64))
    check(lambda rows: launched(quantize_rowwise, x[rows], INT8, 64))
    check(lambda rows: launched(quantize_rowwise, x[rows], INT8, 128))

    def add(rows: slice, delta: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        own = None if delta is None else delta[rows]
        return launched(add_rms_norm_quant, x[rows], residual[rows], own, gain, 1e-5, True, INT8, 64)

    check(lambda rows: add(rows, delta))
    every = slice(0, MOST)
    for got, want in zip(add(every, torch.zeros_like(delta)), add(every, None), strict=True):
        assert torch.equal(bits(got), bits(want)), "rows without an adapter"


@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_append(heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    qkv, delta = randn(MOST, (heads + 2 * kv_heads) * dim), randn(MOST, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(MOST, 1, dim, device="cuda") * 6
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    slots = torch.arange(MOST, device="cuda", dtype=torch.int32)
    norm = randn(2, dim) if normed else None

    def run(rows: slice, delta: torch.Tensor | None = delta) -> tuple[torch.Tensor, ...]:
        cache = torch.zeros(kv_cache_shape(MOST // 64, kv_heads, dim), device="cuda", dtype=INT8)
        scales = torch.zeros(kv_scales_shape(MOST // 64, kv_heads), device="cuda")
        args = (qkv[rows], None if delta is None else delta[rows], cos[rows], sin[rows], cache, scales, slots[rows])
        (q,) = launched(rope_append, *args, heads, kv_heads, True, None, None, None, norm, 1e-6, True)
        stored = cache.permute(0, 3, 1, 2, 4).reshape(MOST, -1), scales.permute(0, 3, 1, 2).reshape(MOST, -1)
        return q, *(each[rows] for each in stored)

    check(run)
    every = slice(0, MOST)
    for got, want in zip(run(every, torch.zeros_like(delta)), run(every, None), strict=True):
        assert torch.equal(bits(got), bits(want)), "rows without an adapter"


@pytest.mark.parametrize("tokens", [DECODE_TOKENS, PROMPT_TOKENS])
@pytest.mark.parametrize("ranks", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("k, slices", [(4096, [4096, 1024, 1024]), (14336, [4096]), (576, [1536, 1536])])
def test_lora(k: int, slices: list[int], ranks: int, tokens: int) -> None:
    """Decode steps have the planes and tiles of one number of tokens, prompts of another; tokens are next to those of
    other adapters.
    """
    slots, tile, splits = 5, lora_tile(tokens), lora_splits(k, tokens)
    torch.manual_seed(1)
    index = torch.randint(-1, slots, (512,))
    case = lora_case(512, k, ranks, slices, slots=slots, device="cuda", adapter_index=index).quantized(True, INT8)

    def run(chosen: torch.Tensor) -> torch.Tensor:
        x, x_scale = case.x[chosen], None if case.x_scale is None else case.x_scale[chosen]
        small = lora_case(
            len(chosen), k, 16, [16], slots=slots, device="cuda", adapter_index=index[chosen.cpu()], tile=tile
        )
        plan = small.token_order, small.tiles, tile
        (planes,) = launched(lora_shrink, x, case.a, *plan, splits, case.a_scale, x_scale)
        (delta,) = launched(lora_expand, planes, case.b, *plan, slices, case.b_scale)
        return delta

    whole = run(torch.arange(512, device="cuda"))
    for size in (1, 2, 8, 17, 64, 130, 256, 511):
        chosen = torch.randperm(512, device="cuda")[:size]
        assert torch.equal(bits(run(chosen)), bits(whole[chosen])), f"{size} tokens"


@pytest.mark.parametrize("vocabulary", [512, 32001, 49152, 128256])
def test_log_probabilities(vocabulary: int) -> None:
    """Also for vocabularies whose rows do not begin at multiples of 16 bytes."""
    from sidestream.ops.elementwise.sample import top_logprobs

    sampler = Sampler(256, torch.device("cuda"), exact=True)
    logits = randn(256, vocabulary, dtype=FP16) * 4
    tokens = logits.argmax(-1).int()
    whole = top_logprobs(sampler._aligned(logits), tokens, 3)
    for first, size in ((0, 1), (3, 1), (5, 8), (17, 64), (1, 255)):
        rows = slice(first, first + size)
        part = top_logprobs(sampler._aligned(logits[rows]), tokens[rows], 3)
        assert torch.equal(bits(part.token_logprob), bits(whole.token_logprob[rows]))
        assert torch.equal(bits(part.logprobs), bits(whole.logprobs[rows]))
