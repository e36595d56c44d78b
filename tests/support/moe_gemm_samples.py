"""Random linears of experts, and sample inputs of these ops for `tests/ops/test_opcheck.py`."""

from dataclasses import dataclass
from typing import Any

import torch
from sidestream.ops.core.triton_support import cdiv
from sidestream.ops.lora.plan import lora_plan_reference
from sidestream.ops.moe.grouped_linear import expert_tile

from support.samples import BF16, FP8, eight_bit, normal, samples

Plan = tuple[torch.Tensor, torch.Tensor, int]


def routing(tokens: int, top_k: int, count: int, kind: str = "uniform", padding: int = 0) -> torch.Tensor:
    """Experts [T, k] int32 of each token, all different; the last `padding` tokens have none.

    uniform: any expert; skewed: low ones much more often; single: every token has the same ones.
    """
    likely = torch.arange(count, 0, -1, dtype=torch.float32).pow(4) if kind == "skewed" else torch.ones(count)
    chosen = torch.multinomial(likely.expand(max(tokens, 1), -1), top_k)[:tokens]
    if kind == "single":
        chosen = chosen[:1].expand(tokens, -1).clone()
    chosen[tokens - padding :] = -1
    return chosen.to(torch.int32)


def plan(experts: torch.Tensor, count: int, tile: int | None = None) -> Plan:
    """(order, tiles, tile) of the pairs of experts [T, k]."""
    pairs = experts.reshape(-1)
    tile = tile or expert_tile(len(pairs), count)
    device = experts.device
    order, tiles = lora_plan_reference(pairs.cpu(), count, tile)
    return order.to(device), tiles.to(device), tile


@dataclass(frozen=True)
class Experts:
    """Weights of all experts and activations; results have a standard deviation of about 1."""

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    weight_scale: torch.Tensor
    experts: torch.Tensor
    pairs_per_row: int

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        """The operands of an eight-bit product."""
        return self.x, self.scale, self.weight, self.weight_scale

    def plan(self, tile: int | None = None) -> Plan:
        """(order, tiles, tile)."""
        return plan(self.experts, len(self.weight), tile)


def experts_case(
    experts: torch.Tensor,
    count: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.int8,
    by_pair: bool = False,
    device: str = "cpu",
) -> Experts:
    """A case for `experts` [T, k] of `count` experts; `by_pair`: x has a row for each pair."""
    tokens, top_k = experts.shape
    rows = cdiv(tokens * top_k, 1 if by_pair else top_k)
    if dtype in (torch.int8, FP8):
        (x, scale), (weight, weight_scale) = (
            eight_bit(*shape, dtype=dtype, device=device) for shape in ((rows, k), (count, n, k))
        )
        scale = scale * k**0.5
    else:
        x, weight = normal(rows, k, dtype=dtype), (torch.randn(count, n, k) / k**0.5).to(dtype)
        scale, weight_scale = torch.empty(0), torch.empty(0)
    return Experts(
        x.to(device),
        weight.to(device),
        scale.to(device),
        weight_scale.to(device),
        experts.to(device),
        1 if by_pair else top_k,
    )


def _cases(n: int = 40) -> list[Experts]:
    return [
        experts_case(routing(5, 2, 4, padding=1), 4, n, 48, torch.int8),
        experts_case(routing(3, 3, 8, "skewed"), 8, n, 64, FP8, by_pair=True),
    ]


def _wide_cases() -> list[Experts]:
    return [
        experts_case(routing(5, 2, 4, padding=1), 4, 40, 48, BF16),
        experts_case(routing(3, 3, 8, "skewed"), 8, 24, 32, torch.float32, by_pair=True),
    ]


@samples("expert_linear")
def _expert_linear() -> list[tuple[Any, ...]]:
    return [(case.x, case.weight, case.experts, case.pairs_per_row) for case in _wide_cases()]


@samples("expert_linear_8bit")
def _expert_linear_8bit() -> list[tuple[Any, ...]]:
    return [(*case.given, case.experts, case.pairs_per_row, BF16) for case in _cases()]


@samples("grouped_linear")
def _grouped_linear() -> list[tuple[Any, ...]]:
    return [(case.x, case.weight, *case.plan(), case.pairs_per_row) for case in _wide_cases()]


@samples("grouped_linear_8bit")
def _grouped_linear_8bit() -> list[tuple[Any, ...]]:
    return [
        (*case.given, delta, *case.plan(), case.pairs_per_row, BF16)
        for case in _cases()
        for delta in (None, normal(case.experts.numel(), 40))
    ]


@samples("grouped_linear_8bit_silu_mul")
def _grouped_linear_8bit_silu_mul() -> list[tuple[Any, ...]]:
    return [(*case.given, *case.plan(), case.pairs_per_row, BF16) for case in _cases()]


@samples("expert_lora")
def _expert_lora() -> list[tuple[Any, ...]]:
    adapters, experts = torch.tensor([1, -1, 0, 1, 0], dtype=torch.int32), routing(5, 2, 4, padding=1)
    a, b = normal(2, 4, 32, 48), normal(2, 4, 40, 16)
    (q, scale), (a8, a_scale), (b8, b_scale) = (
        eight_bit(*shape, dtype=torch.int8) for shape in ((10, 48), (2, 4, 32, 48), (2, 4, 40, 16))
    )
    return [
        (normal(5, 48), a, b, adapters, experts, [24, 16], 2),
        (q, a8, b8, adapters, experts, [24, 16], 1, a_scale, b_scale, scale),
    ]
