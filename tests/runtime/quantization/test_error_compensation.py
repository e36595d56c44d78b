"""Error-compensated rounding against what it must not be worse than: rounding to nearest, and the best of all ways."""

import itertools

import pytest
import torch
from sidestream.ops.elementwise.quantize import quantize_rowwise
from sidestream.runtime.quantization.error_compensation import compensation, round_rows


def inputs(tokens: int, width: int) -> torch.Tensor:
    """Rows whose columns correlate, as activations' do."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(width, width, generator=generator) * torch.logspace(0, -2, width)[:, None]
    return torch.randn(tokens, width, generator=generator) @ mixed


def error(x: torch.Tensor, weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> float:
    """Squared error of the products."""
    return float((x @ (weight - values.float() * scale[:, None]).t()).square().sum())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_products_with_such_inputs_change_far_less(dtype: torch.dtype) -> None:
    x, weight = inputs(512, 160), torch.randn(48, 160, generator=torch.Generator().manual_seed(1))
    nearest, compensated = quantize_rowwise(weight, dtype), round_rows(weight, compensation(x.t() @ x), dtype)
    assert compensated[0].dtype == dtype and torch.equal(compensated[1], nearest[1])
    assert error(inputs(512, 160), weight, *compensated) < 0.5 * error(x, weight, *nearest)
    again = round_rows(weight, compensation(x.t() @ x), dtype)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(compensated, again, strict=True))


def test_where_inputs_do_not_correlate_it_rounds_to_nearest() -> None:
    weight = torch.randn(32, 48)
    values, scale = round_rows(weight, compensation(torch.diag(torch.rand(48) + 0.1)), torch.int8)
    nearest, nearest_scale = quantize_rowwise(weight, torch.int8)
    assert torch.equal(values, nearest) and torch.equal(scale, nearest_scale)
    assert torch.equal(round_rows(weight, compensation(torch.zeros(48, 48)), torch.int8)[0], nearest), "never read"


def test_it_comes_near_the_best_of_all_ways_to_round() -> None:
    """Of seven columns every way that is at most two steps off is tried."""
    x, weight = inputs(64, 7), torch.randn(6, 7, generator=torch.Generator().manual_seed(2))
    down = (weight / quantize_rowwise(weight, torch.int8)[1][:, None]).floor()
    values, scale = round_rows(weight, compensation(x.t() @ x), torch.int8)
    ways = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0, 2.0), repeat=7)))
    best = 0.0
    for row in range(len(weight)):
        tried = (weight[row] - (down[row] + ways) * scale[row]) @ x.t()
        best += float(tried.square().sum(-1).min())
    nearest = error(x, weight, *quantize_rowwise(weight, torch.int8))
    assert error(x, weight, values, scale) < best + 0.25 * (nearest - best)
