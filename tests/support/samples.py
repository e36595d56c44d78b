"""Sample inputs of every op, for tests that hold for all ops (`tests/ops/test_opcheck.py`).

Give a new op a function here: `@samples("name")` on a function that returns a list of argument tuples (small CPU
tensors, a few different shapes or options each).
"""

from collections.abc import Callable
from typing import Any

import torch
from sidestream.ops.collectives.tensor_parallel_group import RankGroup, register_group
from sidestream.ops.core.dtypes import round_residual
from sidestream.ops.core.kv_layout import kv_cache_shape, kv_scales_shape
from sidestream.ops.elementwise.quantize_blocks import reference as quantize_blocks_reference
from sidestream.ops.lora.expand_rounded import lora_round_reference
from sidestream.ops.lora.plan import lora_active_reference
from sidestream.ops.lora.shrink import reference as lora_shrink_reference

from support.drafts import answers_to_keep, rings_of_answers, steps_of_drafts
from support.lora import LoraCase, lora_case

SAMPLES: dict[str, Callable[[], list[tuple[Any, ...]]]] = {}
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def samples(name: str) -> Callable[[Callable[[], list[tuple[Any, ...]]]], Callable[[], list[tuple[Any, ...]]]]:
    """Registers the decorated function as the samples of op `name`."""

    def add(function: Callable[[], list[tuple[Any, ...]]]) -> Callable[[], list[tuple[Any, ...]]]:
        SAMPLES[name] = function
        return function

    return add


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Standard normal values of `dtype` (of e4m3 too)."""
    return torch.randn(shape).to(dtype)


def empty_cache(
    pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A zeroed KV cache of `dtype` and its scales (None for a 16-bit or fp32 cache)."""
    cache = torch.zeros(kv_cache_shape(pages, kv_heads, head_dim), dtype=dtype)
    return cache, torch.zeros(kv_scales_shape(pages, kv_heads)) if dtype in (FP8, torch.int8) else None


def angles(tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, D] of random angles, halves duplicated as HF has them."""
    phase = (torch.rand(tokens, 1, head_dim // 2) * 6.28).repeat(1, 1, 2)
    return phase.cos(), phase.sin()


def eight_bit(*shape: int, dtype: torch.dtype = FP8, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of e4m3 or int8 with a scale each, so that a product with a row has about the size of what it is
    multiplied with.
    """
    values, scale = (
        torch.randn(*shape, device=device, dtype=BF16),
        (torch.rand(*shape[:-1], device=device) + 0.5) * shape[-1] ** -0.5,
    )
    return (
        ((values * 32).round().clamp(-127, 127).to(dtype), scale / 32)
        if dtype == torch.int8
        else (values.to(dtype), scale)
    )


def sylvester(width: int) -> torch.Tensor:
    """The Hadamard matrix [width, width], normalised, in fp64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    assert len(matrix) == width
    return matrix * width**-0.5


def rotated_rows(x: torch.Tensor, width: int = 128) -> torch.Tensor:
    """x [..., K] in fp64, each block of `width` columns times the Hadamard matrix; twice is x."""
    return (x.double().unflatten(-1, (-1, width)) @ sylvester(width).to(x.device)).flatten(-2)


def exact(values: torch.Tensor, scale: torch.Tensor, rotated: int = 0) -> torch.Tensor:
    """What eight-bit rows stand for, in fp64; that blocks of `rotated` columns of int8 ones were rotated is undone."""
    rows = values.double() * scale.double().unsqueeze(-1)
    return rows if values.dtype == FP8 or not rotated else rotated_rows(rows, rotated)


def decoder_block_inputs(
    tokens: int,
    attention: int,
    hidden: int,
    intermediate: int,
    qkv: int,
    device: str = "cpu",
    dtype: torch.dtype = FP8,
    stream: torch.dtype = BF16,
) -> tuple[Any, ...]:
    """Arguments of `decoder_block`, e4m3 or int8, whose activations are of order 1; qkv 0: nothing is projected
    after it. `stream`: float16 for residuals as sixteenths.
    """

    def linear(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        return eight_bit(rows, columns, dtype=dtype, device=device)

    gains = [1 + 0.1 * torch.randn(hidden, device=device) for _ in range(2)]
    return (
        *quantize_blocks_reference(torch.randn(tokens, attention, device=device), dtype),
        round_residual(torch.randn(tokens, hidden, device=device), stream, BF16),
        *linear(hidden, attention),
        gains[0].to(BF16),
        *linear(2 * intermediate, hidden),
        *linear(hidden, intermediate),
        gains[1].to(BF16),
        *(linear(qkv, hidden) if qkv else (None, None)),
        1e-5,
    )


def silu_mul_lora_inputs(case: LoraCase, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    """Arguments of `silu_mul_lora` for a case of two packed linears; gates and deltas are of the same size."""
    planes, b, *plan, _slices, b_scale = case.quantized(False, torch.int8).expand(lora_shrink_reference(*case.shrink))
    return (
        torch.randn(len(case.x), sum(case.slices), device=case.x.device).to(dtype),
        *lora_round_reference(planes, 2),
        b,
        b_scale,
        *plan,
    )


def lora_expand_rounded_inputs(case: LoraCase) -> tuple[Any, ...]:
    """Arguments of `lora_expand_rounded`."""
    planes, b, *plan, slices, b_scale = case.quantized(False, torch.int8).expand(lora_shrink_reference(*case.shrink))
    return *lora_round_reference(planes, len(slices)), b, b_scale, *plan, slices


@samples("all_reduce")
def _all_reduce() -> list[tuple[Any, ...]]:
    register_group(RankGroup("tp1", 0, 1))
    return [(normal(3, 24), "tp1"), (normal(2, 16, dtype=torch.float32), "tp1")]


@samples("all_gather")
def _all_gather() -> list[tuple[Any, ...]]:
    return [(*args, columns) for args, columns in zip(_all_reduce(), (24, 13), strict=True)]


@samples("all_reduce_add_rms_norm_quant")
def _all_reduce_add_rms_norm_quant() -> list[tuple[Any, ...]]:
    register_group(RankGroup("tp1", 0, 1))
    x, residual, delta, weight = normal(3, 24), normal(3, 24), normal(3, 24), normal(24)
    return [
        (x, residual, delta, weight, 1e-5, "tp1", True, torch.int8, 8),
        (x, residual, None, weight, 1e-5, "tp1", False, torch.int8, 0, True),
        (x, residual.to(FP16), None, weight, 1e-5, "tp1", False, torch.int8, 0, True),
    ]


@samples("argmax")
def _argmax() -> list[tuple[Any, ...]]:
    return [(normal(3, 50, dtype=dtype),) for dtype in (BF16, torch.float32)]


@samples("best_of_part")
def _best_of_part() -> list[tuple[Any, ...]]:
    row = torch.rand(3) + 0.5
    return [
        (normal(3, 50), 50, 43),
        (
            normal(3, 50, dtype=torch.float32),
            0,
            50,
            normal(3, dtype=torch.float32),
            row,
            torch.arange(3),
            torch.arange(3),
        ),
    ]


@samples("embedding")
def _embedding() -> list[tuple[Any, ...]]:
    return [
        (torch.randint(0, 11, (5,)), normal(11, 16)),
        (torch.randint(0, 11, (3,), dtype=torch.int32), normal(11, 16, dtype=torch.float32)),
        (torch.randint(0, 11, (3,)), normal(11, 16), torch.float16),
    ]


@samples("residual_values")
def _residual_values() -> list[tuple[Any, ...]]:
    return [(normal(3, 24, dtype=torch.float16), BF16), (normal(3, 24), BF16)]


@samples("rms_norm")
def _rms_norm() -> list[tuple[Any, ...]]:
    return [
        (normal(3, 24), normal(24), 1e-5),
        (normal(2, 2, 16, dtype=torch.float32), normal(16, dtype=torch.float32), 1e-6),
        (normal(3, 24, dtype=torch.float16), normal(24), 1e-5),
    ]


@samples("add_rms_norm")
def _add_rms_norm() -> list[tuple[Any, ...]]:
    return [
        (normal(3, 24), normal(3, 24), None, normal(24), 1e-5),
        (normal(3, 24), normal(3, 24), normal(3, 24), normal(24), 1e-5),
        (normal(3, 24), normal(3, 24, dtype=torch.float16), None, normal(24), 1e-5),
    ]


@samples("rms_norm_quant")
def _rms_norm_quant() -> list[tuple[Any, ...]]:
    return [(normal(3, 24, dtype=dtype), normal(24), 1e-5, keep) for keep in (True, False) for dtype in (BF16, FP16)]


@samples("add_rms_norm_quant")
def _add_rms_norm_quant() -> list[tuple[Any, ...]]:
    return [
        (normal(3, 24), normal(3, 24, dtype=dtype), delta, normal(24), 1e-5, keep)
        for delta, keep in ((None, True), (normal(3, 24), False))
        for dtype in (BF16, FP16)
    ]


@samples("quantize_rowwise")
def _quantize_rowwise() -> list[tuple[Any, ...]]:
    return [(normal(3, 24),), (normal(2, 2, 16, dtype=torch.float32),)]


@samples("silu_mul")
def _silu_mul() -> list[tuple[Any, ...]]:
    return [(normal(3, 48), None), (normal(2, 2, 32), normal(2, 2, 32))]


@samples("silu_mul_quant")
def _silu_mul_quant() -> list[tuple[Any, ...]]:
    return [(normal(3, 48), None, True), (normal(3, 48), normal(3, 48), False)]


@samples("silu_mul_blocks")
def _silu_mul_blocks() -> list[tuple[Any, ...]]:
    return [(normal(3, 512), None), (normal(40, 256), normal(40, 256), torch.int8, 128)]


@samples("lora_round")
def _lora_round() -> list[tuple[Any, ...]]:
    return [(normal(2, 5, 48, dtype=torch.float32), 3), (normal(1, 3, 40, dtype=torch.float32), 1)]


@samples("lora_expand_rounded")
def _lora_expand_rounded() -> list[tuple[Any, ...]]:
    return [
        lora_expand_rounded_inputs(lora_case(9, 64, 16, [48, 16, 16], splits=2)),
        lora_expand_rounded_inputs(lora_case(3, 64, 32, [20])),
    ]


@samples("silu_mul_lora")
def _silu_mul_lora() -> list[tuple[Any, ...]]:
    return [
        silu_mul_lora_inputs(lora_case(9, 64, 16, [48, 48], splits=2)),
        silu_mul_lora_inputs(lora_case(3, 64, 32, [20, 20]), torch.float32),
    ]


def lora_adjust_inputs(
    tokens: int, n: int, slots: int = 3, dtype: torch.dtype = BF16, parts: str = "gain shift", device: str = "cpu"
) -> tuple[Any, ...]:
    """Arguments of `lora_adjust` without a rotation; slot 0 has only zeros, and every fourth token no adapter."""
    stacks = [torch.randn(slots, n, device=device) if part in parts else None for part in ("gain", "shift")]
    for stack in stacks:
        if stack is not None:
            stack[0] = 0.0
    index = torch.randint(0, slots, (tokens,), device=device, dtype=torch.int32)
    index[::4] = -1
    return torch.randn(tokens, n, device=device).to(dtype), *stacks, index


@samples("lora_adjust")
def _lora_adjust() -> list[tuple[Any, ...]]:
    return [
        lora_adjust_inputs(5, 48),
        (*lora_adjust_inputs(3, 64, parts="gain", dtype=torch.float32), 16, 32, 64),
        lora_adjust_inputs(1, 20, parts="shift"),
    ]


@samples("rope")
def _rope() -> list[tuple[Any, ...]]:
    return [
        (normal(3, 2, 16), *angles(3, 16)),
        (normal(1, 2, 3, 8, dtype=torch.float32), *(part.view(1, 1, 3, 8) for part in angles(3, 8))),
    ]


@samples("rope_angles")
def _rope_angles() -> list[tuple[Any, ...]]:
    return [(torch.arange(3), torch.rand(8)), (torch.tensor([5], dtype=torch.int32), torch.rand(4))]


@samples("hadamard")
def _hadamard() -> list[tuple[Any, ...]]:
    return [(normal(3, 2, 16),), (normal(4, 64, dtype=torch.float32),)]


@samples("append_kv")
def _append_kv() -> list[tuple[Any, ...]]:
    slots = torch.tensor([65, -1, 3], dtype=torch.int32)
    cases = ((BF16, None), (FP8, None), (torch.int8, torch.randn(2, 16)))
    return [
        (normal(3, 2, 16), normal(3, 2, 16), *empty_cache(2, 2, 16, dtype), slots, center) for dtype, center in cases
    ]


@samples("rope_append")
def _rope_append() -> list[tuple[Any, ...]]:
    slots = torch.tensor([65, -1, 3], dtype=torch.int32)
    return [
        (normal(3, 96), delta, *angles(3, 16), *empty_cache(2, 1, 16, dtype), slots, 4, 1, hadamard, center)
        for delta, dtype, hadamard, center in (
            (None, BF16, False, None),
            (normal(3, 96), FP8, False, None),
            (None, torch.int8, True, torch.randn(1, 16)),
        )
    ]


@samples("paged_attention")
def _paged_attention() -> list[tuple[Any, ...]]:
    table, lens = torch.tensor([[2, 1], [0, -1]], dtype=torch.int32), torch.tensor([70, 3], dtype=torch.int32)
    cases = (
        (5, [0, 2, 4], FP8, True, False),
        (2, [0, 1, 2], BF16, False, True),
        (4, [0, 3, 4], torch.int8, False, False),
    )
    return [
        (
            normal(tokens, 4, 64),
            *empty_cache(3, 2, 64, dtype),
            table,
            lens,
            torch.tensor(starts, dtype=torch.int32),
            0.125,
            quantize_q,
            decode,
        )
        for tokens, starts, dtype, quantize_q, decode in cases
    ]


@samples("paged_attention_quant")
def _paged_attention_quant() -> list[tuple[Any, ...]]:
    return [(*args, keep) for args in _paged_attention() for keep in (True, False)]


@samples("paged_attention_blocks")
def _paged_attention_blocks() -> list[tuple[Any, ...]]:
    table, lens = torch.tensor([[2, 1], [0, -1]], dtype=torch.int32), torch.tensor([70, 3], dtype=torch.int32)
    return [(normal(2, 4, 64), *empty_cache(3, 2, 64, dtype), table, lens, 0.125) for dtype in (FP8, BF16)]


@samples("quantize_blocks")
def _quantize_blocks() -> list[tuple[Any, ...]]:
    return [(normal(3, 256),), (normal(40, 128, dtype=torch.float32),)]


@samples("decoder_block")
def _decoder_block() -> list[tuple[Any, ...]]:
    return [
        decoder_block_inputs(3, 512, 256, 512, width, dtype=dtype, stream=stream)
        for width, dtype, stream in ((128, FP8, BF16), (0, FP8, BF16), (128, torch.int8, BF16), (0, torch.int8, FP16))
    ]


@samples("lora_plan")
def _lora_plan() -> list[tuple[Any, ...]]:
    return [
        (torch.tensor([1, -1, 0, 1, 3], dtype=torch.int32), 4, 16),
        (torch.full((40,), 2, dtype=torch.int32), 3, 16),
    ]


@samples("lora_shrink")
def _lora_shrink() -> list[tuple[Any, ...]]:
    quantized = lora_case(5, 64, 16, [32]).quantized(True, torch.int8)
    blocks = lora_case(5, 256, 16, [32]).quantized(True, torch.int8)
    q, scale = quantize_blocks_reference(normal(5, 256), torch.int8)
    return [
        lora_case(9, 64, 16, [32, 16]).shrink,
        lora_case(3, 300, 32, [32], splits=2, dtype=torch.float32).shrink,
        quantized.shrink,
        (q, *blocks.shrink[1:7], scale),
    ]


@samples("lora_expand")
def _lora_expand() -> list[tuple[Any, ...]]:
    cases = (
        lora_case(9, 64, 16, [32, 16]),
        lora_case(3, 300, 32, [32], splits=2),
        lora_case(5, 64, 16, [32]).quantized(False, torch.int8),
    )
    return [case.expand(torch.randn(case.splits, len(case.x), case.a.shape[1])) for case in cases]


@samples("lora")
def _lora() -> list[tuple[Any, ...]]:
    quantized = lora_case(5, 64, 16, [32]).quantized(True, torch.int8)
    return [lora_case(9, 64, 16, [32, 16]).lora, lora_case(3, 64, 32, [32], dtype=torch.float32).lora, quantized.lora]


@samples("sample")
def _sample() -> list[tuple[Any, ...]]:
    def row(*values: float) -> torch.Tensor:
        return torch.tensor(values)

    top_k, keys = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([3, -5])
    return [
        (normal(2, 50, dtype=dtype), row(0.0, 0.8), top_k, row(1.0, 0.9), row(0.0, 0.05), keys, keys)
        for dtype in (BF16, torch.float32)
    ]


@samples("widen_plan")
def _widen_plan() -> list[tuple[Any, ...]]:
    table = torch.arange(18, dtype=torch.int32).view(3, 6)
    lens, starts = torch.tensor([300, 5, 190], dtype=torch.int32), torch.tensor([0, 40, 41, 180], dtype=torch.int32)
    return [(table, lens, starts, 4, 8), (table, lens, starts, 32, 3)]


def shared_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """block_table and context_lens of five sequences, of which four share four pages."""
    table = torch.arange(30, dtype=torch.int32).view(5, 6)
    table[1:4, :4] = table[0, :4]
    return table, torch.tensor([300, 257, 384, 320, 5], dtype=torch.int32)


@samples("prefix_plan")
def _prefix_plan() -> list[tuple[Any, ...]]:
    return [(*shared_tables(), 32), (*shared_tables(), 4)]


@samples("prefix_attention")
def _prefix_attention() -> list[tuple[Any, ...]]:
    plan = torch.tensor([[4, 4, 4, 4, 0], [4, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.int32)
    table, _ = shared_tables()
    return [(normal(5, 4, 128), *empty_cache(30, 2, 128, dtype), table, plan, 0.1) for dtype in (torch.int8, FP8)]


@samples("widen_kv")
def _widen_kv() -> list[tuple[Any, ...]]:
    cache = torch.randint(-127, 128, (4, 2, 2, 64, 16), dtype=torch.int8)
    return [(cache, torch.rand(4, 2, 2, 64), torch.tensor([[3, 1], [0, 0], [-1, -1]], dtype=torch.int32))]


@samples("linear_8bit_lora")
def _linear_8bit_lora() -> list[tuple[Any, ...]]:
    def case(
        tokens: int, k: int, slices: list[int], ranks: int, splits: int, out_dtype: torch.dtype
    ) -> tuple[Any, ...]:
        operands = [part for rows in (tokens, sum(slices)) for part in eight_bit(rows, k, dtype=torch.int8)]
        index = torch.randint(-1, 3, (tokens,), dtype=torch.int32)
        return (
            *operands,
            torch.randn(splits, tokens, len(slices) * ranks),
            *eight_bit(3, sum(slices), ranks, dtype=torch.int8),
            index,
            lora_active_reference(index, 3),
            slices,
            out_dtype,
        )

    return [case(5, 64, [48, 16], 16, 2, BF16), case(140, 32, [32], 32, 1, torch.float32)]


@samples("lora_active")
def _lora_active() -> list[tuple[Any, ...]]:
    return [
        (torch.tensor([3, -1, 3, 0, 1], dtype=torch.int32), 4),
        (torch.randint(-1, 7, (130,), dtype=torch.int32), 9),
    ]


@samples("linear_8bit_silu_mul")
def _linear_8bit_silu_mul() -> list[tuple[Any, ...]]:
    def case(*leading: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
        return (
            normal(*leading, k, dtype=FP8),
            torch.rand(leading) + 0.5,
            normal(n, k, dtype=FP8),
            torch.rand(n) / k**0.5,
        )

    return [(*case(3, n=48, k=32), None, BF16), (*case(2, 2, n=32, k=16), normal(2, 2, 32), torch.float32)]


@samples("linear_8bit")
def _linear_8bit() -> list[tuple[Any, ...]]:
    def case(*leading: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
        return normal(*leading, k, dtype=FP8), torch.rand(leading) + 0.5, normal(n, k, dtype=FP8), torch.rand(n) + 0.5

    blocks = (
        *quantize_blocks_reference(normal(3, 256), torch.int8),
        eight_bit(48, 256, dtype=torch.int8)[0],
        torch.rand(48) + 0.5,
        normal(3, 48),
        None,
        BF16,
    )
    return [
        (*case(3, n=48, k=32), None, None, BF16),
        (*case(2, 2, n=32, k=16), normal(2, 2, 32), normal(2, 2, 32), torch.float32),
        blocks,
    ]


@samples("draft_ngram")
def _draft_ngram() -> list[tuple[Any, ...]]:
    return [steps_of_drafts(most=most)["draft_ngram"] for most in (3, 1)]


@samples("place_drafts")
def _place_drafts() -> list[tuple[Any, ...]]:
    return [steps_of_drafts(most=most)["place_drafts"] for most in (3, 0)]


@samples("accept_drafts")
def _accept_drafts() -> list[tuple[Any, ...]]:
    return [steps_of_drafts(most=most)["accept_drafts"] for most in (3, 0)]


@samples("draft_recalled")
def _draft_recalled() -> list[tuple[Any, ...]]:
    return [rings_of_answers(most=most) for most in (3, 1)]


@samples("keep_answers")
def _keep_answers() -> list[tuple[Any, ...]]:
    return [answers_to_keep()]
