"""`straight_through`: values of one tensor, gradient of another."""

import numpy as np
import pytest
import torch
from sidestream import straight_through


def test_the_values_are_exact_and_the_gradient_is_the_approximation_s():
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, generator=source, requires_grad=True)
    factors = torch.randn(1000, generator=source)
    exact = torch.from_numpy(np.random.default_rng(1).normal(size=1000).astype(np.float32))
    result = straight_through((weight * 3).sin(), exact)
    assert torch.equal(result, exact) and result.data_ptr() != exact.data_ptr()
    (result * factors).sum().backward()
    (expected,) = torch.autograd.grad(((weight * 3).sin() * factors).sum(), weight)
    assert torch.equal(weight.grad, expected)
    assert not torch.equal((weight * 3).sin() + (exact - (weight * 3).sin()).detach(), exact), "the sum that rounds"


def test_no_gradient_goes_to_the_exact_value():
    approximate, exact = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    straight_through(approximate, exact).sum().backward()
    assert exact.grad is None and approximate.grad.tolist() == [1.0] * 3
    assert not straight_through(torch.zeros(3), exact).requires_grad


def test_a_wider_approximation_keeps_the_values():
    exact = torch.tensor([0.1, -1e-30])
    assert torch.equal(straight_through(torch.zeros(2, dtype=torch.float64), exact), exact.double())


@pytest.mark.parametrize(
    ("approximate", "exact", "words"),
    [
        (torch.zeros(2), torch.zeros(3), r"shape \[2\], exact \[3\]"),
        (torch.zeros(2, 1), torch.zeros(2), "give both the same shape"),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), r"would round exact's torch.float32; give approximate"),
    ],
)
def test_what_would_change_the_values_is_refused(approximate, exact, words):
    with pytest.raises(ValueError, match=words):
        straight_through(approximate, exact)
