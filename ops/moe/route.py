"""`moe_route`: the experts of each token and their weights, from the router's logits."""

from typing import Any, Optional

import torch
import triton
import triton.language as tl

from ..core.device import multiprocessors, workspace
from ..core.registry import register
from ..core.reproducible_sums import exponential, product, sum_in_order
from ..core.triton_support import cdiv, dot_ieee, next_power_of_2, pdl_options, pdl_start, require_contiguous

MANY_TOKENS = 256  # above: larger tiles, and as many splits as fill the GPU


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    delta: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    top_k: int,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` experts of each token with the largest logits x W^T (+ delta), and their weights.

    x             [T, H] model dtype
    weight        [E, H] in x's dtype
    delta         [T, E] LoRA of the router, or None
    slot_mapping  [T] int32; -1: padding, which has no experts
    normalize     weights are the softmax over the chosen logits; otherwise the chosen of the softmax over all

    Returns (experts [T, top_k] int32 in descending order of weight, -1 for padding; weights [T, top_k] fp32, 0 for
    padding). Logits are summed and kept in fp32. Of equal logits the lower expert is first.
    """
    logits = product(x, weight, torch.float32)
    if delta is not None:
        logits = logits + delta.float()
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = logits.gather(1, order)
    powers = exponential(logits - chosen[:, :1])
    own = powers.gather(1, order)
    total = own if normalize else powers
    weights = (own / sum_in_order(total)).float()
    padding = (slot_mapping < 0).unsqueeze(1)
    return order.to(torch.int32).masked_fill(padding, -1), weights.masked_fill(padding, 0.0)


def fake(
    x: torch.Tensor, weight: torch.Tensor, delta: Any, slot_mapping: Any, top_k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results."""
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


@triton.jit
def _logits_kernel(
    x, weight, planes, tokens, experts, k, width, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute planes[split, tokens, experts] fp32 from `width` columns; program (token block, expert block, split).

    ONCE: the columns are one step, and the weight, which no earlier kernel writes, is loaded before the wait.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    begin = tl.program_id(2) * width
    end = tl.minimum(begin + width, k)
    step = tl.arange(0, BLOCK_K)
    w_rows = weight + expert[:, None] * k
    x_rows = x + token.to(tl.int64)[None, :] * k
    total = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    if ONCE:
        column = begin + step
        w = tl.load(w_rows + column[None, :], mask=(expert < experts)[:, None] & (column < end)[None, :], other=0.0)
        pdl_start(PDL)
        rows = tl.load(x_rows + column[:, None], mask=(token < tokens)[None, :] & (column < end)[:, None], other=0.0)
        total = dot_ieee(w, rows, total)
    else:
        pdl_start(PDL)
        for start in tl.range(begin, end, BLOCK_K, num_stages=3):
            column = start + step
            w = tl.load(w_rows + column[None, :], mask=(expert < experts)[:, None] & (column < end)[None, :], other=0.0)
            rows = tl.load(
                x_rows + column[:, None], mask=(token < tokens)[None, :] & (column < end)[:, None], other=0.0
            )
            total = dot_ieee(w, rows, total)
    plane = planes + tl.program_id(2).to(tl.int64) * tokens * experts
    target = plane + token.to(tl.int64)[None, :] * experts + expert[:, None]
    tl.store(target, total, mask=(token < tokens)[None, :] & (expert < experts)[:, None])


@triton.jit
def _choose_kernel(
    planes, delta, slot_mapping, experts, weights, tokens, num_experts, SPLITS: tl.constexpr, HAS_DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr, TOP_K: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum one token's planes in their order and choose its experts.

    A logit's key has its value in the high word (bits ordered like floats, NaN above all numbers) and the inverted
    expert in the low word: keys differ, and the largest is the largest logit of the lowest expert.
    """
    pdl_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < num_experts
    logits = tl.zeros([BLOCK_E], tl.float32)
    for split in tl.static_range(SPLITS):  # all loads at once
        logits += tl.load(planes + (split * tokens + token) * num_experts + expert, mask=inside, other=0.0)
    if HAS_DELTA:
        logits += tl.load(delta + token * num_experts + expert, mask=inside, other=0.0).to(tl.float32)
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(logits == logits, bits, 0x7FFFFFFF)
    least: tl.constexpr = -0x8000000000000000
    keys = tl.where(inside, (bits.to(tl.int64) << 32) + (0x7FFFFFFF - expert).to(tl.int64), least)
    place = tl.arange(0, CHOSEN)
    chosen = tl.zeros([CHOSEN], tl.int32)
    values = tl.full([CHOSEN], float("-inf"), tl.float32)
    for j in tl.static_range(TOP_K):
        key = tl.max(keys, axis=0)
        value = (key >> 32).to(tl.int32)
        value = tl.where(value < 0, value ^ 0x7FFFFFFF, value).to(tl.float32, bitcast=True)
        if j == 0:
            largest = value
        chosen = tl.where(place == j, 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32), chosen)
        values = tl.where(place == j, value, values)
        keys = tl.where(keys == key, least, keys)
    powers = tl.exp(values - largest)
    total = tl.sum(powers if NORMALIZE else tl.where(inside, tl.exp(logits - largest), 0.0), axis=0)
    real = tl.load(slot_mapping + token) >= 0
    tl.store(experts + token * TOP_K + place, tl.where(real, chosen, -1), mask=place < TOP_K)
    tl.store(weights + token * TOP_K + place, tl.where(real, powers / total, 0.0), mask=place < TOP_K)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    delta: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    top_k: int,
    normalize: bool,
    *,
    out: tuple[torch.Tensor, ...],
    sm_budget: int | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` by two launches: planes of logits, and a choice for each token. Ignores `sm_budget`.

    Few tokens: many small programs, which read the weight early. Many: enough programs to fill the GPU.
    """
    (tokens, k), num_experts = x.shape, weight.shape[0]
    require_contiguous("moe_route", x=x, weight=weight, delta=delta, slot_mapping=slot_mapping)
    if tokens == 0:
        return
    once = tokens <= MANY_TOKENS
    block_t = 16 if once else 64
    block_e = max(16, min(32 if once else 128, next_power_of_2(num_experts)))
    block_k = 64 if not once else 256 if x.element_size() == 2 else 64
    blocks = cdiv(tokens, block_t), cdiv(num_experts, block_e)
    splits = cdiv(k, block_k)
    if not once:
        wanted = min(splits // 4, multiprocessors(x.device) // (blocks[0] * blocks[1]))
        splits = 1 << max(0, wanted.bit_length() - 1)  # a power of two: few compilations
    width = cdiv(cdiv(k, splits), block_k) * block_k
    splits = cdiv(k, width)
    planes = workspace(x.device, "moe_route", splits * tokens * num_experts * 4).view(torch.float32)
    _logits_kernel[(*blocks, splits)](
        x, weight, planes, tokens, num_experts, k, width, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=block_k, ONCE=once,
        num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    experts, weights = out
    _choose_kernel[(tokens,)](
        planes, delta, slot_mapping, experts, weights, tokens, num_experts, SPLITS=splits, HAS_DELTA=delta is not None,
        NORMALIZE=normalize, TOP_K=top_k, CHOSEN=next_power_of_2(top_k), BLOCK_E=next_power_of_2(num_experts),
        num_warps=1, **pdl_options(pdl),
    )  # fmt: skip


moe_route = register("moe_route", reference, fake, launch, kind="moe_route", family="moe")
