"""`sample`: one token per row from its logits, with noise that depends only on (seed, step, token id).

So a request draws the same tokens in any row of any batch. Thresholds define the kept set: min_p is the minimum
probability relative to the best token's, top_k keeps logits not below the k-th largest, top_p keeps the smallest set
{logit >= threshold} with that share of the remaining probability. Ties at a threshold are kept. The token has the
largest `scaled logit + Gumbel noise` of the kept set (Gumbel-max: an exact draw from the renormalised softmax).

Noise: `mix32` (two multiplications, three xor-shifts) mixes 32-bit words. The words of (seed, step) give two keys, and
a token's word is mix32(mix32(id ^ key0) ^ key1); v = (word + 0.5) / 2**32 and noise = -log(-log(1 - v)). This is
precise for small v, which give the largest noise.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..core.registry import register
from ..core.triton_support import next_power_of_2, pdl_options, pdl_start, require_contiguous
from .token_masks import allow, check_masks, masked_logits

GREEDY_BELOW = 1e-5  # temperatures below this mean argmax
_MASK = 0xFFFFFFFF


def _mix32(word: torch.Tensor) -> torch.Tensor:
    """Apply a mixing bijection to 32-bit words in int64; only the low 32 bits of products are used."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _MASK
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _MASK
    return word ^ (word >> 16)


def _row_key(seeds: torch.Tensor, steps: torch.Tensor, start: int) -> torch.Tensor:
    """Return one 32-bit key per row from the four words of (seed, step)."""
    key = torch.full_like(seeds, start)
    for word in (seeds, seeds >> 32, steps, steps >> 32):
        key = _mix32(key ^ (word & _MASK))
    return key


def gumbel_noise(seeds: torch.Tensor, steps: torch.Tensor, vocabulary: int, first: int = 0) -> torch.Tensor:
    """Return standard Gumbel noise [B, vocabulary] fp32 for tokens from `first` on; seeds and steps are [B] int64."""
    ids = torch.arange(first, first + vocabulary, dtype=torch.int64, device=seeds.device)
    word = _mix32(ids ^ _row_key(seeds, steps, 0x243F6A88)[:, None])
    word = _mix32(word ^ _row_key(seeds, steps, 0x85A308D3)[:, None])
    v = ((word.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def perturbed_scores(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> torch.Tensor:
    """Return the scores of `sample`, which returns their argmax.

    A score is (logit - max) / temperature + noise, and -inf for dropped tokens. In greedy rows it is the logit.
    """
    filtered = filtered_logits(logits, temperature, top_k, top_p, min_p)
    noise = gumbel_noise(seeds, steps, logits.shape[1])
    return torch.where((temperature < GREEDY_BELOW)[:, None], filtered, filtered + noise)


def filtered_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (logit - max) / temperature in fp32, and -inf for tokens that the filters drop, but not for `tokens` [B].
    In greedy rows it is the logit.
    """
    logits = logits.float()
    greedy = (temperature < GREEDY_BELOW)[:, None]
    relative = (logits - logits.amax(-1, keepdim=True)) * (1.0 / temperature.where(~greedy[:, 0], 1.0))[:, None]
    descending = relative.sort(-1, descending=True).values
    keep = relative >= torch.log(min_p)[:, None]
    last = torch.where(top_k > 0, top_k, logits.shape[1]).clamp_max(logits.shape[1]).long() - 1
    keep &= relative >= descending.gather(1, last[:, None])

    lowest_kept = relative.where(keep, torch.inf).amin(-1, keepdim=True)
    mass = descending.exp().where(descending >= lowest_kept, 0.0).double().cumsum(-1)
    before_enough = (mass < top_p.double()[:, None] * mass[:, -1:]).sum(-1, keepdim=True).clamp_max(logits.shape[1] - 1)
    nucleus = relative >= descending.gather(1, before_enough)
    keep &= nucleus | (top_p >= 1.0)[:, None]
    if tokens is not None:
        keep.scatter_(1, tokens.long()[:, None], True)
    return torch.where(greedy, logits, relative.where(keep, -torch.inf))


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row.

    logits       [B, V] any float dtype
    temperature  [B] fp32; below 1e-5: argmax, the lowest id among equals
    top_k        [B] int32, 0 = off
    top_p        [B] fp32 in (0, 1], 1 = off
    min_p        [B] fp32 in [0, 1], 0 = off: least probability relative to the best token's
    seeds, steps [B] int64: the noise's key, e.g. a request's seed and the number of its generated tokens
    masks        [M, W] int32 and mask_rows [B] int32: allowed tokens (see `token_masks`), before all filters
    returns      [B] int32 token ids; -1 for a row that has NaN or an infinite largest logit
    """
    logits = masked_logits(logits, masks, mask_rows)
    scores = perturbed_scores(logits, temperature, top_k, top_p, min_p, seeds, steps)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    drawn = ids.where(scores == scores.amax(-1, keepdim=True), logits.shape[1]).amin(-1)
    return drawn.where(logits.amax(-1).isfinite(), -1)


def fake(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result."""
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)


class TopLogprobs(NamedTuple):
    """Log-probabilities of one step for B rows."""

    token_logprob: torch.Tensor  # [B] fp32, of the given token
    token_rank: torch.Tensor  # [B] int64, number of tokens that are at least as likely; 1 = most likely
    ids: torch.Tensor  # [B, n] int64, the n most likely tokens, best first
    logprobs: torch.Tensor  # [B, n] fp32


def top_logprobs(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> TopLogprobs:
    """Return log-probabilities of the given tokens [B] and of the n most likely ones, in fp32.

    They are computed from raw logits [B, V], before temperature and filters.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, tokens.long()[:, None])
    best = logprobs.topk(min(n, logits.shape[1]), dim=-1)
    return TopLogprobs(own.squeeze(1), (logprobs >= own).sum(-1), best.indices, best.values)


@triton.jit
def _mix32_kernel(word):
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def row_key_kernel(seed, step, START: tl.constexpr):
    """Return `_row_key` of one row."""
    key = _mix32_kernel(seed.to(tl.uint32) ^ START)
    key = _mix32_kernel(key ^ (seed >> 32).to(tl.uint32))
    key = _mix32_kernel(key ^ step.to(tl.uint32))
    return _mix32_kernel(key ^ (step >> 32).to(tl.uint32))


@triton.jit
def gumbel_kernel(token, key0, key1):
    """Return the noise of tokens; the keys are those of a row."""
    word = _mix32_kernel(_mix32_kernel(token.to(tl.uint32) ^ key0) ^ key1)
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log(1 - v), by its series for small v, since 1 - v would lose digits of v
    series = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * 0.25)))
    return -tl.log(tl.where(v < 0.00390625, series, -tl.log(1.0 - v)))


@triton.jit
def _to_key(value, SHIFT: tl.constexpr):
    """Return an integer that orders floats, without the SHIFT low bits that the logits' dtype does not use."""
    bits = value.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT).to(tl.int64)


@triton.jit
def _from_key(key, SHIFT: tl.constexpr):
    bits = key.to(tl.int32) << SHIFT
    return tl.where(bits < 0, bits ^ (0x7FFFFFFF >> SHIFT << SHIFT), bits).to(tl.float32, bitcast=True)


@triton.jit
def _load_logits(row, start, vocabulary, mask, mask_row, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return (tokens, logits); logits of masked tokens are -inf, but NaN stays NaN."""
    token = start + tl.arange(0, BLOCK)
    inside = token < vocabulary
    logit = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
    if MASKED:
        logit = tl.where(logit != logit, logit, allow(logit, token, inside, mask, mask_row))
    return token, logit


@triton.jit
def best_of(best, index):
    """Return (largest value, lowest index with this value)."""
    largest = tl.max(best, axis=0)
    return largest, tl.min(tl.where(best == largest, index, 0x7FFFFFFF), axis=0)


@triton.jit
def _count(row, vocabulary, bound, mask, mask_row, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return the number of logits >= bound."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        _, logit = _load_logits(row, start, vocabulary, mask, mask_row, BLOCK, MASKED)
        total += (logit >= bound).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def _mass(row, vocabulary, bound, least, largest, inverse, mask, mask_row, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return the sum of exp(relative) over logits >= bound with a relative value >= least."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        _, logit = _load_logits(row, start, vocabulary, mask, mask_row, BLOCK, MASKED)
        relative = (logit - largest) * inverse
        total += tl.where((logit >= bound) & (relative >= least), tl.exp(relative), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _draw(
    row, vocabulary, largest, inverse, temperature, top_k, top_p, min_p, seed, step, mask, mask_row,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the kept token with the largest relative value + noise.

    relative = (logit - largest) * inverse, kept = relative >= least.
    """
    least = tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
    # Noise is between -2.9 and 23, so a token more than 30 below the best never wins: search thresholds above that.
    nearest = largest + (tl.maximum(least, -30.0) - 0.01) * temperature - 1e-5 * tl.abs(largest)
    if (top_k > 0) & (top_k < vocabulary):
        low, high = _to_key(nearest, SHIFT), _to_key(largest, SHIFT)
        while low < high:
            middle = (low + high + 1) >> 1
            if _count(row, vocabulary, _from_key(middle, SHIFT), mask, mask_row, BLOCK, MASKED) >= top_k:
                low = middle
            else:
                high = middle - 1
        least = tl.maximum(least, (_from_key(low, SHIFT) - largest) * inverse)
    if top_p < 1.0:
        enough = top_p * _mass(row, vocabulary, float("-inf"), least, largest, inverse, mask, mask_row, BLOCK, MASKED)
        low, high = _to_key(nearest, SHIFT), _to_key(largest, SHIFT)
        while low < high:
            middle = (low + high + 1) >> 1
            if (
                _mass(row, vocabulary, _from_key(middle, SHIFT), least, largest, inverse, mask, mask_row, BLOCK, MASKED)
                >= enough
            ):
                low = middle
            else:
                high = middle - 1
        least = tl.maximum(least, (_from_key(low, SHIFT) - largest) * inverse)

    key0, key1 = row_key_kernel(seed, step, 0x243F6A88), row_key_kernel(seed, step, 0x85A308D3)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.arange(0, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        token, logit = _load_logits(row, start, vocabulary, mask, mask_row, BLOCK, MASKED)
        relative = (logit - largest) * inverse
        score = tl.where(relative >= least, relative + gumbel_kernel(token, key0, key1), float("-inf"))
        index = tl.where(score > best, token, index)
        best = tl.maximum(best, score)
    return best_of(best, index)[1]


@triton.jit(do_not_specialize=["rows"])  # one compilation for every number of rows
def sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, steps, masks, mask_rows, tokens, rows, vocabulary,
    GREEDY: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sample whole rows in each program.

    Each pass reads the row again (from L2). A greedy row needs one pass, a row with noise two, and each of top_k and
    top_p about ten more.
    """
    pdl_start(PDL)
    row_index = tl.program_id(0)
    while row_index < rows:
        row = logits + row_index.to(tl.int64) * vocabulary
        mask, mask_row = masks, -1
        if MASKED:
            mask_row = tl.load(mask_rows + row_index)
            mask = masks + tl.maximum(mask_row, 0).to(tl.int64) * ((vocabulary + 31) // 32)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        index = tl.arange(0, BLOCK)
        broken = tl.zeros([BLOCK], tl.int1)
        for start in range(0, vocabulary, BLOCK):
            token, logit = _load_logits(row, start, vocabulary, mask, mask_row, BLOCK, MASKED)
            index = tl.where(logit > best, token, index)
            best = tl.where(logit > best, logit, best)
            broken |= logit != logit
        largest, chosen = best_of(best, index)
        temperature = tl.load(temperatures + row_index)
        if (tl.max(broken.to(tl.int32), axis=0) > 0) | (tl.abs(largest) == float("inf")):
            chosen = -1
        elif temperature >= GREEDY:
            chosen = _draw(
                row,
                vocabulary,
                largest,
                tl.div_rn(1.0, temperature),
                temperature,
                tl.load(top_ks + row_index),
                tl.load(top_ps + row_index),
                tl.load(min_ps + row_index),
                tl.load(seeds + row_index),
                tl.load(steps + row_index),
                mask,
                mask_row,
                BLOCK,
                SHIFT,
                MASKED,
            )
        tl.store(tokens + row_index, chosen)
        row_index += tl.num_programs(0)


# low bits of the fp32 pattern that a dtype does not use
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` = (tokens,) by one program per row, at most `sm_budget` programs."""
    rows, vocabulary = logits.shape
    require_contiguous("sample", logits=logits)
    check_masks("sample", logits, masks, mask_rows)
    if rows == 0:
        return
    widest = 8192 if masks is None else 4096  # 1,024 threads have 64 registers each, too few with masks
    block = min(widest, max(128, next_power_of_2(vocabulary)))
    sample_kernel[(rows if sm_budget is None else min(rows, sm_budget),)](
        logits, temperature, top_k, top_p, min_p, seeds, steps, logits if masks is None else masks,
        logits if mask_rows is None else mask_rows, out[0], rows, vocabulary, GREEDY=GREEDY_BELOW, BLOCK=block,
        SHIFT=_UNUSED_BITS[logits.dtype], MASKED=masks is not None, num_warps=max(4, block // 256), **pdl_options(pdl),
    )  # fmt: skip


sample = register("sample", reference, fake, launch)
