"""The harness itself: a kernel that is wrong in one of the usual ways must not pass `check_kernel`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sidestream.ops.attention.append_kv import append_kv
from sidestream.ops.elementwise.hadamard import hadamard
from support.checks import Tolerance, assert_near, check_kernel
from support.samples import SAMPLES


def launch_then(fault: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[..., None]:
    def launch(x: torch.Tensor, *, out: tuple[torch.Tensor, ...], **options: Any) -> None:
        out[0].copy_(hadamard.reference(x))
        fault(x, out[0])

    return launch


def skip_one(x: torch.Tensor, out: torch.Tensor) -> None:
    out.view(-1)[3] = float("nan")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (skip_one, r"1 of 64 elements are off .*from \[0, 3\]\); worst at \(0, 3\): nan"),
        (lambda x, out: out.mul_(1.05), "output 0: 64 of 64 elements are off"),
        (lambda x, out: x.add_(1), "changed its argument x"),
        (lambda x, out: out.add_(1e-6 * torch.rand(())), "other bits at a second launch"),
    ],
)
def test_a_faulty_kernel_is_told(fault: Callable[[torch.Tensor, torch.Tensor], None], message: str) -> None:
    x = 2 + torch.rand(1, 64)
    with pytest.raises(AssertionError, match=message):
        check_kernel(replace(hadamard, launch=launch_then(fault)), x)


def test_a_right_kernel_passes() -> None:
    check_kernel(replace(hadamard, launch=launch_then(lambda x, out: None)), torch.randn(2, 64))


def test_a_mutated_argument_is_compared() -> None:
    args = SAMPLES["append_kv"]()[0]
    with pytest.raises(AssertionError, match="argument kv_cache"):
        check_kernel(replace(append_kv, launch=lambda *args, **options: None), *args)


def test_one_step_is_fine_but_not_everywhere() -> None:
    expected = torch.full((100,), 8.0).to(torch.float8_e4m3fn)
    one, every = expected.clone(), torch.full((100,), 9.0).to(torch.float8_e4m3fn)
    one[5] = every[5]
    assert_near(one, expected)
    with pytest.raises(AssertionError, match=r"100.0% of the elements differ"):
        assert_near(every, expected)
    with pytest.raises(AssertionError, match=r"1 of 100 elements are off"):
        assert_near(one, expected, Tolerance(0.1))
