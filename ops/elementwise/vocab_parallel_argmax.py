"""`best_of_part`: the best token of a rank's part of the vocabulary, as a key that ranks can compare.

A key has the value in its high word (a float's bits, ordered like floats) and the inverted token in its low word. So
the largest key of all parts has the largest value, and the lowest token of those. Ranks exchange 8 bytes per row
instead of all logits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors
from ..core.registry import register
from ..core.triton_support import cdiv, pdl_options, pdl_start, require_contiguous
from .argmax import BLOCK, MAX_PIECES, PROGRAMS_PER_SM
from .sample import best_of, gumbel_kernel, gumbel_noise, row_key_kernel

_TOKENS = 0x7FFFFFFF  # the low word is this minus the token
_NAN = 0x7FFFFFFF  # its high word, above all numbers
_LEAST = -(1 << 63)


def keys_of(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return int64 keys of fp32 values and integer tokens. NaN is above all numbers, and -0 equals 0."""
    bits = (values + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = torch.where(values.isnan(), _NAN, ordered)
    return (ordered.long() << 32) + (_TOKENS - tokens.long())


def values_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of keys."""
    ordered = (keys >> 32).to(torch.int32)
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)


def tokens_of(keys: torch.Tensor) -> torch.Tensor:
    """Return the int32 tokens of keys."""
    return (_TOKENS - (keys & 0xFFFFFFFF)).to(torch.int32)


def reference(
    logits: torch.Tensor,
    first: int,
    count: int,
    largest: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    steps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return keys [B] int64 of the largest logits of a rank's part; the key of NaN for a row with NaN.

    logits   [B, N] of tokens first, first + 1, ...; only the first `count` columns are tokens
    largest  [B] fp32: largest logit of the whole row, given together with temperature, seeds and steps (as in
             `sample`); keys are then of the largest (logit - largest) / temperature + noise: an unfiltered draw
    """
    if not count:
        nothing = torch.full(logits.shape[:1], -torch.inf, device=logits.device)
        return keys_of(nothing, torch.zeros_like(nothing))
    values = logits[:, :count].float()
    if largest is not None and temperature is not None and seeds is not None and steps is not None:
        noise = gumbel_noise(seeds, steps, count, first)
        values = (values - largest[:, None]) * (1.0 / temperature)[:, None] + noise
    best = values.amax(-1, keepdim=True)  # NaN for a row with NaN
    columns = torch.arange(count, device=logits.device)
    return keys_of(best[:, 0], first + columns.where(values == best, count - 1).amin(-1))


def fake(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result."""
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


@triton.jit(do_not_specialize=["first", "count", "span"])  # they depend on the rank and on the number of rows
def _best_kernel(
    logits, largest, temperature, seeds, steps, keys, first, count, stride, span, DRAWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Reduce one piece: program (piece, row) reads columns from piece * span on."""
    piece, row = tl.program_id(0), tl.program_id(1)
    pdl_start(PDL)
    source = logits + row.to(tl.int64) * stride
    if DRAWS:
        top, inverse = tl.load(largest + row), tl.div_rn(1.0, tl.load(temperature + row))
        seed, step = tl.load(seeds + row), tl.load(steps + row)
        key0, key1 = row_key_kernel(seed, step, 0x243F6A88), row_key_kernel(seed, step, 0x85A308D3)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = piece * span + tl.arange(0, BLOCK)
    broken = tl.zeros([BLOCK], tl.int1)
    for start in range(0, span, BLOCK):
        column = piece * span + start + tl.arange(0, BLOCK)
        inside = (start + tl.arange(0, BLOCK) < span) & (column < count)
        value = tl.load(source + column, mask=inside, other=float("-inf")).to(tl.float32)
        if DRAWS:
            value = tl.where(inside, (value - top) * inverse + gumbel_kernel(first + column, key0, key1), float("-inf"))
        broken |= value != value
        index = tl.where(value > best, column, index)
        best = tl.where(value > best, value, best)
    found, chosen = best_of(best, index)
    bits = (found + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(tl.max(broken.to(tl.int32), axis=0) > 0, 0x7FFFFFFF, ordered)
    key = (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - (first + chosen)).to(tl.int64)
    tl.atomic_max(keys + row, key)


def launch(
    logits: torch.Tensor,
    first: int,
    count: int,
    largest: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    steps: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (keys,), with pieces of rows as in `argmax`. Ignores `sm_budget`: the launch is small."""
    require_contiguous("best_of_part", logits=logits)
    rows, width = logits.shape
    if rows == 0:
        return
    wanted = max(1, min(MAX_PIECES, PROGRAMS_PER_SM * multiprocessors(logits.device) // rows))
    span = max(1, cdiv(cdiv(count, wanted), BLOCK)) * BLOCK
    out[0].fill_(_LEAST)
    _best_kernel[(max(1, cdiv(count, span)), rows)](
        logits,
        logits if largest is None else largest,
        logits if temperature is None else temperature,
        logits if seeds is None else seeds,
        logits if steps is None else steps,
        out[0],
        first,
        count,
        width,
        span,
        DRAWS=largest is not None,
        BLOCK=BLOCK,
        num_warps=8 if largest is None else 16,  # noise needs more registers
        **pdl_options(pdl),
    )


best_of_part = register("best_of_part", reference, fake, launch)
