"""The weighted sum of a token's experts, alone and before residual and norm."""

from typing import Any

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.elementwise.combine_rms_norm import combine_add_rms_norm, combine_add_rms_norm_quant
from sidestream.ops.elementwise.rms_norm import add_rms_norm, add_rms_norm_quant
from sidestream.ops.moe.combine import moe_combine
from support.checks import Tolerance, check_kernel
from support.moe_samples import combined
from support.sm90 import launched

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# a product and a sum in one rounding or two: a step of the result in a few places
STEP = {BF16: Tolerance(2.0**-7, 1e-5, differing=0.02), FP32: Tolerance(1e-5, 1e-5)}
TWO_STEPS = {BF16: Tolerance(2.0**-6, 1e-5, differing=0.04), FP32: Tolerance(1e-5, 1e-5)}
SCALE = Tolerance(2.0**-6)  # after a step of the row's maximum


def norm_inputs(
    tokens: int,
    top_k: int,
    width: int,
    delta: bool,
    dtype: torch.dtype = BF16,
    stream: torch.dtype | None = None,
    padding: int = 0,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """z, weights, delta, residual, gain and eps."""
    gain = (1 + 0.1 * torch.randn(width, device=device)).to(dtype)
    residual = torch.randn(tokens, width, device=device).to(stream or dtype)
    return (*combined(tokens, top_k, width, delta, dtype, padding, device), residual, gain, 1e-5)


def check_norms(args: tuple[Any, ...], keep: bool, **options: Any) -> None:
    """Both ops, the quantizing one in both dtypes and with a rotation."""
    dtype, residual = args[4].dtype, Tolerance(2.0**-9, 1e-5, differing=0.02) if args[3].dtype == FP16 else None
    residual = residual or STEP[dtype]
    check_kernel(OPS["combine_add_rms_norm"], *args, tolerances={0: TWO_STEPS[dtype], 1: residual}, **options)
    for form, step in (
        ((torch.float8_e4m3fn, 0), Tolerance(2.0**-3, 2.0**-9, differing=0.05)),
        ((torch.int8, 8), Tolerance(0.0, 2.0, differing=0.05)),
    ):
        tolerances: dict[int | str, Tolerance] = {0: TWO_STEPS[dtype], 1: step, 2: SCALE, 3: residual}
        check_kernel(OPS["combine_add_rms_norm_quant"], *args, keep, *form, tolerances=tolerances, **options)


def test_the_sum_is_rounded_once_and_skips_weights_of_zero() -> None:
    z, weights, delta = combined(7, 4, 24, True, padding=2)
    weights[0, 1] = 0.0
    z[1] = float("inf")  # the row of that weight
    assert delta is not None
    want = torch.zeros(7, 24, dtype=torch.float64)
    for token in range(5):
        for j in range(4):
            if weights[token, j]:
                row = z[4 * token + j].double() + delta[4 * token + j].double()
                want[token] += weights[token, j].double() * row
    y = moe_combine(z, weights, delta)
    assert y.dtype == BF16 and torch.isfinite(y).all() and (y[5:] == 0).all()
    torch.testing.assert_close(y.double(), want, rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(moe_combine(z, weights).double()[0], moe_combine(z, weights, 0 * z).double()[0])


def test_what_is_no_number_stays_one_in_its_token() -> None:
    z, weights, _ = combined(3, 2, 16, False)
    z[2, 5] = float("nan")
    y = moe_combine(z, weights)
    assert y[1, 5].isnan() and y.isnan().sum() == 1


@pytest.mark.parametrize("stream", [None, FP16])
def test_the_fused_ops_are_the_norms_of_the_sum(stream: torch.dtype | None) -> None:
    z, weights, delta, residual, gain, eps = norm_inputs(5, 2, 48, True, stream=stream, padding=1)
    assert delta is not None
    # in fp32 the sum is not rounded, and the residual's dtype decides
    y, new_residual = combine_add_rms_norm(z, weights, delta, residual, gain, eps)
    total = moe_combine(z.float(), weights, delta.float())
    wide_y, wide_residual = add_rms_norm(total, residual, None, gain, eps)
    assert torch.equal(new_residual, wide_residual) and torch.equal(y, wide_y.to(BF16))
    _, *wide = add_rms_norm_quant(total, residual, None, gain, eps, False, torch.int8, 8)
    for keep in (True, False):
        own_y, *rest = combine_add_rms_norm_quant(z, weights, delta, residual, gain, eps, keep, torch.int8, 8)
        assert torch.equal(own_y, y) if keep else own_y.shape == (0, 48)
        assert all(torch.equal(a, b) for a, b in zip(rest, wide, strict=True))
    # padding adds nothing
    assert torch.equal(new_residual[4], residual[4])


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("tokens", "top_k", "width", "delta"), [(1, 8, 64, True), (5, 2, 1100, False), (3, 1, 17, True)]
)
def test_kernel(tokens: int, top_k: int, width: int, delta: bool, dtype: torch.dtype) -> None:
    check_kernel(moe_combine, *combined(tokens, top_k, width, delta, dtype, tokens // 3), tolerances={0: STEP[dtype]})


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("top_k", "width", "delta", "keep", "dtype", "stream"),
    [
        (8, 64, True, True, BF16, FP16),
        (2, 96, False, False, BF16, None),
        (1, 40, True, False, FP32, None),
    ],
)
def test_kernels_with_norm(
    top_k: int, width: int, delta: bool, keep: bool, dtype: torch.dtype, stream: torch.dtype | None
) -> None:
    check_norms(norm_inputs(3, top_k, width, delta, dtype, stream, 1), keep)


@pytest.mark.interpret
def test_kernel_of_one_expert_of_weight_one_is_the_plain_norm() -> None:
    x, residual, delta, gain = (torch.randn(3, 64).to(BF16) for _ in range(4))
    gain = gain[0]
    plain, fused = (op.fake(x, residual) for op in (add_rms_norm, add_rms_norm))
    add_rms_norm.launch(x, residual, delta, gain, 1e-5, out=plain)
    combine_add_rms_norm.launch(x, torch.ones(3, 1), delta, residual, gain, 1e-5, out=fused)
    assert all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 2048])
@pytest.mark.parametrize(("top_k", "width", "delta", "keep"), [(8, 2048, True, True), (2, 4096, False, False)])
@pytest.mark.parametrize("stream", [None, FP16])
def test_on_the_gpu(tokens: int, top_k: int, width: int, delta: bool, keep: bool, stream: torch.dtype | None) -> None:
    args = norm_inputs(tokens, top_k, width, delta, BF16, stream, tokens // 3, "cuda")
    check_kernel(moe_combine, *args[:3], tolerances={0: STEP[BF16]}, pdl=keep)
    check_norms(args, keep, pdl=keep)


@pytest.mark.machine_code(each="top_k")
@pytest.mark.parametrize(("top_k", "width"), [(8, 2048), (2, 4096), (8, 1536)])
def test_machine_code(top_k: int, width: int) -> None:
    z = torch.empty(64 * top_k, width, device="meta", dtype=BF16)
    residual, gain = torch.empty(64, width, device="meta", dtype=FP16), z[0]
    weights = torch.empty(64, top_k, device="meta")
    codes = [
        *launched(moe_combine, z, weights, z, pdl=True),
        *launched(combine_add_rms_norm, z, weights, None, residual, gain, 1e-5, pdl=True),
        *launched(combine_add_rms_norm_quant, z, weights, z, residual, gain, 1e-5, True, torch.int8, 8, pdl=True),
    ]
    for code in codes:
        assert code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1
        assert "ld.global.b16" not in code.ptx_text and "st.global.b16" not in code.ptx_text
    assert codes[-1].registers <= 96
