"""linear_8bit and linear_8bit_silu_mul in int8: the reference against whole numbers, every kernel against the
reference, the choice of kernels.
"""

from typing import Any

import pytest
import torch
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.ops.elementwise.quantize import quantize_rowwise
from sidestream.ops.elementwise.silu_mul import silu_mul
from sidestream.ops.linear import kernel_selection as tuning
from sidestream.ops.linear.kernel_selection import (
    LinearConfig,
    activation_config,
    large_candidates,
    linear_config,
    wide_config,
    work_split,
)
from sidestream.ops.linear.kernel_wide import launch_wide
from sidestream.ops.linear.linear_8bit import launch_config, linear_8bit, reference
from sidestream.ops.linear.linear_8bit_silu_mul import linear_8bit_silu_mul
from support.checks import Tolerance, assert_near, check_kernel
from support.linears import BF16, NEAR, SHAPES, inputs, run
from support.sm90 import compile_launch

FP32, INT8 = torch.float32, torch.int8


def with_and_without_addends(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [args, (*args[:4], None, None)]


def check_activation(args: tuple[Any, ...], two_launches: bool, **options: Any) -> None:
    """linear_8bit_silu_mul in bf16; as two launches its gates and ups are rounded to bf16 before the addends join,
    so each may be 2^-8 of itself off.
    """
    if not two_launches:
        check_kernel(linear_8bit_silu_mul, *args[:5], BF16, tolerances={0: NEAR}, **options)
        return
    # poison and bits
    (actual,) = check_kernel(
        linear_8bit_silu_mul, *args[:5], BF16, tolerances={0: Tolerance(atol=float("inf"))}, **options
    )
    assert_near_activation(actual, args)


def assert_near_activation(actual: torch.Tensor, args: tuple[Any, ...]) -> None:
    packed = reference(*args[:4], None, None, FP32)
    total = packed if args[4] is None else packed + args[4].float()
    (gate, up), (rounded_gate, rounded_up) = total.chunk(2, -1), packed.abs().chunk(2, -1)
    silu = torch.nn.functional.silu(gate)
    # |silu'| < 1.1; the product is rounded too
    allowed = 1.1 * rounded_gate * (up.abs() + rounded_up / 256) + silu.abs() * rounded_up + (silu * up).abs()
    assert_near(
        (actual.float() - silu * up) / (allowed / 256 + 1e-3),
        torch.zeros_like(up),
        Tolerance(atol=1.0),
        "error, in what roundings allow",
    )


def test_reference_is_the_exact_sum() -> None:
    q, scale, weight, weight_scale, delta, residual = inputs(5, 48, 208, dtype=INT8)
    total = (q.long() @ weight.long().t()).double() * scale.double()[:, None] * weight_scale.double()
    assert_near(linear_8bit(q, scale, weight, weight_scale, None, None, FP32), total.float())
    assert_near(
        linear_8bit(q, scale, weight, weight_scale, delta, residual, FP32),
        (total + delta.double() + residual.double()).float(),
    )
    packed = linear_8bit(q, scale, weight, weight_scale, delta, None, FP32)
    assert_near(linear_8bit_silu_mul(q, scale, weight, weight_scale, delta, FP32), silu_mul(packed, None))


@pytest.mark.parametrize("width", [512, 96, 24, 17])
def test_rotated_activations_and_weights_have_the_same_product(width: int) -> None:
    """It only gains: some columns of the activations are far larger than the others, as those of a language model
    are.
    """
    x, weight = torch.randn(64, width), torch.randn(48, width)
    x[:, :: width // 3] *= 30
    error = {}
    for rotate in (0, 128):
        (q, scale), (w, w_scale) = (quantize_rowwise(each, INT8, rotate) for each in (x, weight))
        product = linear_8bit(q, scale, w, w_scale, None, None, FP32)
        error[rotate] = float((product - x @ weight.T).norm() / (x @ weight.T).norm())
    assert error[128] < 0.02 and (width % 2 == 1 or error[128] < 0.9 * error[0]), error


def test_misfits_are_named() -> None:
    q, scale, weight, weight_scale, _, _ = inputs(3, 32, 64, dtype=INT8)
    with pytest.raises(ValueError, match=r"both torch\.int8"):
        linear_8bit(q, scale, weight.to(torch.float8_e4m3fn), weight_scale, None, None, BF16)
    wide = torch.zeros(1, (1 << 17) + 16, dtype=INT8)
    with pytest.raises(ValueError, match=r"131088.*int32"):
        linear_8bit(wide, scale[:1], wide, weight_scale[:1], None, None, BF16)


def test_two_roundings_are_allowed_and_no_more() -> None:
    """The bound for an activation in two launches:

    `silu_mul` of the rounded linear keeps it, wrong scales or a lost addend do not.
    """
    args = inputs(40, 512, 272, dtype=INT8)
    packed = linear_8bit(*args[:4], None, None, BF16)
    assert_near_activation(silu_mul(packed, args[4]), args)
    for wrong in (silu_mul(packed * 1.05, args[4]), silu_mul(packed, None), silu_mul(packed.roll(1, 0), args[4])):
        with pytest.raises(AssertionError, match="roundings"):
            assert_near_activation(wrong, args)


# Configurations


def test_the_table_is_read_and_used() -> None:
    for (n, k, tokens), config in tuning.tuned_table("linear_int8").items():
        assert linear_config(tokens, n, k, 132, int8=True) == config == linear_config(tokens - 1, n, k, 132, int8=True)
        assert config.kernel != "scaled_mm" and config.promote == 0


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 64, 100, 256, 512, 1000, 8192])
def test_configurations_fit_the_gpu(tokens: int, n: int, k: int) -> None:
    whole = n % 16 == 0
    for config in (linear_config(tokens, n, k, 132, whole, int8=True), *large_candidates()):
        assert config.kernel in (("gluon", "wide", "large") if whole else ("gluon", "large"))
        staging = {
            "wide": min(tuning.WIDE_STAGING, config.block_n * config.block_t * 2 // config.parts),
            "large": tuning.WIDE_STAGING,
        }.get(config.kernel, 0)
        assert (
            config.ctas_per_sm * config.stages * (config.block_n + config.block_t) * config.block_k + staging
            <= 226 * 1024
        )
        split = work_split(config, tokens, n, k, 132)
        assert split.programs <= 132 * config.ctas_per_sm and (config.kernel != "large" or split.parts == 1)
        assert tuning.without_tma(config).kernel == "triton"
        if config.kernel == "large":
            assert tuning.with_addends(config).warps == 8


# Machine code


@pytest.mark.machine_code(each="kernel")
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize(
    ("kernel", "config", "addends"),
    [
        ("triton", LinearConfig("triton", 64, 16, split=True, ctas=7), True),
        ("gluon", LinearConfig("gluon", 64, 64, stages=8, split=True, ctas=128, max_registers=96), True),
        ("gluon", LinearConfig("gluon", 128, 16, stages=4, ctas_per_sm=2, max_registers=64), True),
        ("wide", wide_config(256, 128), True),
        ("wide", wide_config(128, 128, 2), True),
        ("gluon fp16", LinearConfig("gluon", 128, 16, stages=4, ctas_per_sm=2, max_registers=64), False),
        ("wide fp16", wide_config(256, 128), False),
        ("large fp16", large_candidates()[0], False),
        ("large", large_candidates()[0], False),
        ("large", large_candidates()[1], True),
        ("large", large_candidates()[2], True),
    ],
    ids=str,
)
def test_kernels_compile_to_wgmma_without_spills(kernel: str, config: LinearConfig, addends: bool) -> None:
    assert kernel.startswith(config.kernel)
    args = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs(64, 4096, 1024, dtype=INT8)]
    out = torch.empty(64, 4096, dtype=torch.float16 if kernel.endswith("fp16") else BF16, device="meta")
    (code,) = compile_launch(
        launch_config, config, *args[:4], *(args[4:] if addends else (None, None)), out, sms=132, pdl=True
    )
    assert code.spills == 0 and code.shared_bytes <= 227 * 1024
    assert code.sass["IGMMA"] > 0 and code.sass["IMMA"] == 0
    assert config.kernel == "triton" or code.sass["UTMALDG"] > 0


@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
def test_the_activation_compiles_without_spills() -> None:
    q, scale, weight, weight_scale = (
        torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs(256, 4096, 1024, dtype=INT8)[:4]
    )
    out, config = torch.empty(256, 2048, dtype=BF16, device="meta"), wide_config(256, 128)
    (code,) = compile_launch(
        launch_wide,
        q,
        scale,
        weight,
        weight_scale,
        None,
        None,
        out,
        config,
        work_split(config, 256, 4096, 1024, 132),
        True,
        True,
    )
    assert code.spills == 0 and code.sass["IGMMA"] > 0


# Kernels in the interpreter


@pytest.mark.interpret
@pytest.mark.parametrize(("tokens", "n", "k"), [(3, 100, 208), (20, 130, 512)])
def test_triton_kernel_has_the_same_bits_however_work_is_shared(tokens: int, n: int, k: int) -> None:
    args = inputs(tokens, n, k, dtype=INT8)
    for given in with_and_without_addends(args):
        results = [
            run(LinearConfig("triton", 64, 16, ctas=ctas, split=split), given, FP32)
            for ctas, split in ((2, False), (5, True), (12, True))
        ]
        assert_near(results[0], reference(*given, FP32))
        assert all(torch.equal(results[0], other) for other in results[1:]), "sums of whole numbers are exact"


@pytest.mark.interpret
def test_launches() -> None:
    args = inputs(18, 80, 144, dtype=INT8)
    check_kernel(linear_8bit, *args, BF16)
    check_kernel(linear_8bit_silu_mul, *args[:5], FP32)


# Kernels on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        LinearConfig("triton", 64, 128, split=True, warps=8),
        LinearConfig("gluon", 128, 64, stages=4, split=True, max_registers=168),
        LinearConfig("gluon", 64, 16, stages=4, ctas_per_sm=2, ctas=264, split=True, max_registers=64),
        wide_config(128, 64, 4),
        wide_config(128, 128, 2),
        wide_config(128, 256),
        wide_config(256, 128, 2),
        *large_candidates(),
    ],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "n", "k"), [(200, 1032, 2064), (777, 4096, 272), (16, 256, 16), (3000, 6144, 4096)])
def test_every_kernel(config: LinearConfig, tokens: int, n: int, k: int) -> None:
    args = inputs(tokens, n, k, device="cuda", dtype=INT8)
    for given in [*with_and_without_addends(args), (*args[:4], None, args[5])]:
        actual = run(config, given, BF16, pdl=True)
        assert_near(actual, reference(*given, BF16), NEAR)
        for options in ({"pdl": True}, {"sm_budget": 37}, {}):
            assert torch.equal(actual, run(config, given, BF16, **options)), "sums of whole numbers are exact"
    logits = run(config, (*args[:4], None, None), torch.float16, pdl=True)
    assert_near(logits, reference(*args[:4], None, None, torch.float16), NEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 40, 128, 256, 500, 2000])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (28672, 4096), (100, 208), (49155, 2048)])
def test_launch(n: int, k: int, tokens: int) -> None:
    args = inputs(tokens, n, k, device="cuda", dtype=INT8)
    for given in with_and_without_addends(args):
        check_kernel(linear_8bit, *given, BF16, tolerances={0: NEAR})
        check_kernel(linear_8bit, *given, BF16, tolerances={0: NEAR}, sm_budget=99, pdl=True)
    if n % 2 == 0:  # as many gates as ups
        check_activation(args, two_launches=activation_config(tokens, n, k, int8=True) is None, pdl=True)
    check_kernel(linear_8bit, *args, FP32, tolerances={0: NEAR})
