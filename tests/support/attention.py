"""Batches of queries over a filled paged cache, for tests of attention, and how near a result is."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from sidestream.ops.core.dtypes import QUANTIZED_MAX
from sidestream.ops.core.kv_layout import KEY, PAGE_SIZE, VALUE, kv_cache_shape, kv_scales_shape
from sidestream.ops.core.triton_support import INTERPRETED

from .sm90 import MachineCode

E4M3, INT8, BF16, FP32 = torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32


@dataclass
class Batch:
    """Queries over a filled cache whose pages lie in random order; unwritten slots hold the largest finite values."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    kv_scales: Optional[torch.Tensor]
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor
    contexts: list[int]
    counts: list[int]

    def args(self, quantize_q: bool = False, decode: bool = False) -> tuple[Any, ...]:
        scale = 1.0 / math.sqrt(self.q.shape[2])
        return (
            self.q,
            self.kv_cache,
            self.kv_scales,
            self.block_table,
            self.context_lens,
            self.query_start,
            scale,
            quantize_q,
            decode,
        )


def make_batch(
    contexts: Sequence[int],
    counts: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    cache: torch.dtype = BF16,
    dtype: torch.dtype = BF16,
    padding: int = 0,
    spare_blocks: int = 1,
    device: str = "cpu",
) -> Batch:
    """Sequences with contexts[b] cached tokens whose last counts[b] are queries; `padding` rows of nobody follow."""
    pages = [-(-context // PAGE_SIZE) for context in contexts]
    blocks = max(pages) + spare_blocks
    order = torch.randperm(sum(pages) + 1)
    table = torch.full((len(contexts), blocks), -1, dtype=torch.int32)
    kv_cache = torch.full(
        kv_cache_shape(len(order), kv_heads, dim), 448.0 if cache == E4M3 else 127.0, device=device
    ).to(cache)
    kv_scales = (
        torch.full(kv_scales_shape(len(order), kv_heads), 3.0, device=device) if cache in QUANTIZED_MAX else None
    )
    used = 0
    for sequence, (context, count) in enumerate(zip(contexts, pages, strict=True)):
        own = order[used : used + count]
        used += count
        table[sequence, :count] = own.int()
        position = torch.arange(context)
        slots = (own[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE).to(device)
        for which in (KEY, VALUE):
            store(torch.randn(context, kv_heads, dim, device=device), which, kv_cache, kv_scales, slots)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    q = torch.randn(sum(counts) + padding, heads, dim, device=device).to(dtype)
    lens = torch.tensor(contexts, dtype=torch.int32)
    return Batch(
        q, kv_cache, kv_scales, table.to(device), lens.to(device), starts.to(device), list(contexts), list(counts)
    )


def share_pages(batch: Batch, rows: Sequence[int], pages: int) -> None:
    """Give sequences `rows` the first one's first pages, as a prefix cache does."""
    for row in rows[1:]:
        batch.block_table[row, :pages] = batch.block_table[rows[0], :pages]


def store(
    heads: torch.Tensor, which: int, kv_cache: torch.Tensor, kv_scales: Optional[torch.Tensor], slots: torch.Tensor
) -> None:
    """heads [T, HK, D] to the slots as append_kv quantizes them; byte-wise, since CUDA lacks indexed stores of e4m3."""
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    if kv_scales is None:
        kv_cache[page, :, which, offset] = heads.to(kv_cache.dtype)
        return
    limit = QUANTIZED_MAX[kv_cache.dtype]
    scale = heads.abs().amax(-1).clamp_min(1e-12) / limit
    values = (heads / scale[..., None]).clamp(-limit, limit)
    rounded = values.round().to(torch.int8) if kv_cache.dtype == INT8 else values.to(E4M3)
    kv_scales[page, :, which, offset] = scale
    kv_cache.view(torch.uint8)[page, :, which, offset] = rounded.view(torch.uint8)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def tolerance(batch: Batch) -> float:
    """bf16 output rounds to 2^-9, P in bf16 likewise; the interpreter cuts off instead of rounding to nearest."""
    return 1e-5 if batch.kv_cache.dtype == FP32 else 1e-2 if INTERPRETED else 4e-3


def spills_in_main_loop(code: MachineCode) -> int:
    """Spill instructions of the shortest loop with both products of a step: the one over steps without a mask.

    The compiler places waits for barriers behind the kernel's end. Their jumps back span code that is no loop, such as
    the last P V product alone.
    """
    products_of_pv = 128 // 16  # keys of a step, keys of an instruction
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops = []
    for line in code.sass_text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1])
            if (jump := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and jump[1] in labels:
                loops.append(lines[labels[jump[1]] :])
    main = min((loop for loop in loops if sum("GMMA" in text for text in loop) > products_of_pv), key=len)
    return sum("STL" in text or "LDL" in text for text in main)
