"""`hadamard`: the transform's definition, its algebra, and its kernel."""

import pytest
import torch
from sidestream.ops.elementwise.hadamard import hadamard
from support.checks import Tolerance, check_kernel
from support.samples import normal
from support.sm90 import launched


def sylvester(width: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.double)
    while matrix.shape[0] < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.double), matrix)
    return matrix / width**0.5


@pytest.mark.parametrize("width", [2, 64, 128])
def test_reference_is_sylvesters_matrix(width: int) -> None:
    x = torch.randn(3, 2, width)
    torch.testing.assert_close(hadamard(x).double(), x.double() @ sylvester(width), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [8, 128])
def test_the_order_of_additions(width: int) -> None:
    """Adapters that were packed by another version must have the same bits: neighbours are added first, in fp32."""
    values = x = torch.randn(3, width) * torch.logspace(-6, 6, width)
    for step in (1 << place for place in range(width.bit_length() - 1)):
        index = torch.arange(width)
        other, sign = values[:, index ^ step], torch.where(index & step == 0, 1.0, -1.0)
        values = other + sign * values
    assert torch.equal(hadamard(x), values * width**-0.5)


def test_it_is_its_own_inverse_and_keeps_dot_products() -> None:
    q, k = torch.randn(2, 5, 64)
    torch.testing.assert_close(hadamard(hadamard(q)), q)
    torch.testing.assert_close((hadamard(q) * hadamard(k)).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-5)


def test_a_width_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match=r"power of two.*not 96"):
        hadamard(torch.randn(2, 96))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 128), (7, 2), (1, 1024)])
def test_kernel(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_kernel(
        hadamard,
        normal(*shape, dtype=dtype),
        tolerances={0: Tolerance(2.0**-7 if dtype == torch.bfloat16 else 1e-5, 2e-6)},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 32, 128), (3, 8, 64), (200, 32, 128), (2048, 8, 128)])
def test_kernel_on_the_gpu(shape: tuple[int, ...]) -> None:
    check_kernel(hadamard, normal(*shape).cuda(), tolerances={0: Tolerance(2.0**-7, 2e-6)}, pdl=True)


@pytest.mark.machine_code
@pytest.mark.parametrize("width", [64, 128])
def test_machine_code(width: int) -> None:
    (code,) = launched(hadamard, torch.empty(64, 32, width, device="meta", dtype=torch.bfloat16), pdl=True)
    assert code.spills == 0 and code.instructions < 500
