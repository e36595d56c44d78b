"""Products of references have the same bits in every batch, on every processor and with every number of threads."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sidestream.ops.core import reproducible_sums as module
from sidestream.ops.core.reproducible_sums import (
    exponential,
    linear,
    mean_square,
    mm,
    power_of_two,
    product,
    silu_in_fp32,
    sum_in_order,
)
from support.other_kernels import OtherKernels
from support.processor import processor_name

NUMERICS = Path(__file__).parents[2] / "support" / "numerics.py"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# what makes the libraries choose other kernels; a variable above the hardware changes nothing, but for ATEN's avx512
PROCESSORS: list[dict[str, str]] = [
    {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512", "OMP_NUM_THREADS": "3"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "MKL_CBWR": "COMPATIBLE"},
]
CHOOSING = {name for each in PROCESSORS for name in each}


def test_results_are_the_same_with_the_kernels_of_other_processors() -> None:
    """One digest for all, and within each no result depends on its neighbours."""
    has_avx512 = "avx512f" in processor_name()
    kept = {name: value for name, value in os.environ.items() if name not in CHOOSING} | {"OMP_NUM_THREADS": "1"}
    runs = []
    for variables in PROCESSORS:
        chosen = {name: value for name, value in variables.items() if value != "avx512" or has_avx512}
        command = [sys.executable, str(NUMERICS)]
        runs.append(subprocess.run(command, env=kept | chosen, capture_output=True, text=True))
    output = "\n".join(f"{run.stdout}{run.stderr}" for run in runs)
    assert all(run.returncode == 0 for run in runs), output
    assert len({run.stdout.splitlines()[0] for run in runs}) == 1, output


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_the_exact_sum_rounded_once(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 517).to(dtype), torch.randn(41, 517).to(dtype), torch.randn(41).to(dtype)
    x[0, 5], weight[:, 9] = 3000.0, 0.0
    exact = [
        [
            math.fsum((*(row * channel).tolist(), own))
            for channel, own in zip(weight.double(), bias.tolist(), strict=True)
        ]
        for row in x.double()
    ]
    assert torch.equal(linear(x, weight, bias), torch.tensor(exact, dtype=torch.float64).to(dtype))
    assert torch.equal(linear(x[0], weight, bias), linear(x, weight, bias)[0])
    assert torch.equal(mm(x, weight.T.contiguous()), linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1 << 10, 1 << 18])
def test_the_order_of_the_library_does_not_matter(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small whole numbers lie on boundaries of 16 bits often, and 2**-30 next to one decides on which side."""
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block)
    for x, weight in (
        (torch.randn(50, 300), torch.randn(70, 300)),
        (torch.randint(-9, 9, (50, 300)) * 1.0, torch.randint(-9, 9, (70, 300)) + 2.0**-9),
        (torch.randn(50, 300) * 10.0 ** -(torch.arange(300) % 5), torch.randn(70, 300)),
    ):
        rows, channels = x.to(dtype), weight.to(dtype)
        results = [product(rows, channels, wanted) for wanted in (dtype, torch.float32)]
        for variant in (1, 2):
            with OtherKernels(variant) as kernels:
                for result in results:
                    assert torch.equal(product(rows, channels, result.dtype), result), processor_name()
                    few = product(rows[7:10], channels, result.dtype)
                    assert torch.equal(few, result[7:10]), processor_name()
            assert set(kernels.products) == {torch.float64}


def test_the_kernels_of_another_processor_change_a_plain_product() -> None:
    """Else the tests here could not fail."""
    x, weight = torch.randn(9, 300), torch.randn(300, 70)
    plain, activated = x @ weight, torch.nn.functional.silu(x)
    with OtherKernels(1):
        assert not torch.equal(x @ weight, plain) and not torch.equal(torch.nn.functional.silu(x), activated)
        assert not torch.equal(x.bfloat16() @ weight.bfloat16(), (x.bfloat16() @ weight.bfloat16()).new_zeros(9, 70))


def test_eight_bits_are_summed_exactly() -> None:
    for low, high in ((-128, 128), (-128, -127), (127, 128)):
        x, weight = (torch.randint(low, high, (rows, 2057), dtype=torch.int8) for rows in (5, 9))
        expected = (x.long() @ weight.long().T).float()
        assert torch.equal(product(x, weight, torch.float32), expected)
        some = slice(16, 48)
        assert torch.equal(
            product(x[:, some], weight[:, some], torch.float32).long(), x[:, some].long() @ weight[:, some].long().T
        )
    x, weight = (torch.randn(rows, 700).mul(100).to(torch.float8_e4m3fn) for rows in (5, 9))
    units = [(each.double() * 512).long() for each in (x, weight)]
    assert torch.equal(product(x, weight, torch.float32), ((units[0] @ units[1].T).double() / 512**2).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_and_nan_stay_where_they_belong(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(30, 64).to(dtype)
    clean = linear(x, weight)
    x[1, 3], x[2, 0], weight[4, 9] = math.inf, math.nan, -math.inf
    found, expected = linear(x, weight), torch.nn.functional.linear(x.double(), weight.double())
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[found.isinf()].sign(), expected[expected.isinf()].sign().to(dtype))
    finite = expected.isfinite()
    assert torch.equal(found[finite], clean[finite]) and finite.sum() == 3 * 29
    large = torch.full((1, 64), torch.finfo(dtype).max, dtype=dtype)
    assert linear(large, large).isinf().all()


def test_empty_products() -> None:
    assert linear(torch.empty(0, 8), torch.empty(3, 8)).shape == (0, 3)
    assert linear(torch.empty(2, 8), torch.empty(0, 8)).shape == (2, 0)
    assert torch.equal(linear(torch.empty(2, 0), torch.empty(3, 0), torch.ones(3)), torch.ones(2, 3))


def test_zeros_after_the_last_column_change_no_sum() -> None:
    values = torch.randn(4, 700, dtype=torch.float64)
    for width in (1, 255, 256, 257, 700):
        padded = torch.zeros(4, 1500, dtype=torch.float64)
        padded[:, :width] = values[:, :width]
        assert torch.equal(sum_in_order(padded), sum_in_order(values[:, :width]))
        torch.testing.assert_close(sum_in_order(padded), values[:, :width].sum(-1, keepdim=True))


def test_elementwise_functions() -> None:
    """Near torch's in fp64; a value has the same result at every place."""
    x = torch.linspace(-60, 60, 40_001)
    wide = x.double()
    torch.testing.assert_close(exponential(x), wide.exp(), rtol=2.0**-36, atol=0.0)
    torch.testing.assert_close(silu_in_fp32(x).double(), torch.nn.functional.silu(wide), rtol=2.0**-23, atol=1e-30)
    torch.testing.assert_close(power_of_two(x * 16), torch.exp2(wide * 16), rtol=2.0**-36, atol=0.0)
    edges = torch.tensor([-1e30, -math.inf, 0.0, 1e30, math.inf, math.nan])
    assert torch.equal(silu_in_fp32(edges[:5]), torch.tensor([-0.0, -math.inf, 0.0, 1e30, math.inf]))
    assert exponential(edges).isnan().tolist() == [False] * 5 + [True] and silu_in_fp32(edges)[5].isnan()
    whole = silu_in_fp32(x)
    for start, length in ((0, 1), (3, 7), (5, 33), (20_000, 1001)):
        assert torch.equal(silu_in_fp32(x[start : start + length]), whole[start : start + length]), processor_name()
    torch.testing.assert_close(mean_square(x.view(1, -1)), wide.square().mean().float().view(1, 1))
