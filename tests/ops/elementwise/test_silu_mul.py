"""SiLU(gate) * up, plain and quantized."""

from typing import Any

import pytest
import sidestream.ops.elementwise.silu_mul
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.elementwise.silu_mul import silu_mul, silu_mul_quant
from support.checks import Tolerance, check_kernel
from support.sm90 import launched

ONE_ROUNDING = Tolerance(2.0**-7, 1e-6, differing=0.01)


def check(name: str, args: tuple[Any, ...], **options: Any) -> None:
    bf16 = args[0].dtype == torch.bfloat16
    h = ONE_ROUNDING if bf16 else Tolerance(2e-5, 1e-6)
    tolerances = {0: h, 2: Tolerance(2.0**-7 if bf16 else 2e-5)}
    check_kernel(OPS[name], *args, tolerances=tolerances, **options)
    if name.endswith("quant"):
        check_kernel(OPS[name], *args, torch.int8, 128, tolerances=tolerances, **options)


def test_reference_rounds_once() -> None:
    gate_up, delta = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    total = gate_up.double() + delta.double()
    exact = total[:, :32] * torch.sigmoid(total[:, :32]) * total[:, 32:]
    assert (silu_mul(gate_up, delta).double() - exact).abs().max() <= (exact.abs() * 2**-8 + 1e-6).max()
    h, q, scale = silu_mul_quant(gate_up, delta, True)
    assert torch.equal(h, silu_mul(gate_up, delta))
    assert torch.equal(q, torch.ops.sidestream.quantize_rowwise(h)[0]) and torch.equal(
        scale, torch.ops.sidestream.quantize_rowwise(h)[1]
    )
    assert silu_mul_quant(gate_up, delta, False)[0].shape == (0, 32)
    _, q, scale = silu_mul_quant(gate_up, delta, False, torch.int8, 128)
    assert all(
        torch.equal(a, b)
        for a, b in zip((q, scale), torch.ops.sidestream.quantize_rowwise(h, torch.int8, 128), strict=True)
    )


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "delta", "keep"),
    [
        ((3, 96), True, True),
        ((2, 2, 64), False, False),
        ((2, 512), False, True),
        ((2, 34), True, False),
        ((2, 2 * 17000), True, True),
    ],
)
def test_kernel(dtype: torch.dtype, shape: tuple[int, ...], delta: bool, keep: bool) -> None:
    gate_up = (3 * torch.randn(shape)).to(dtype)
    added = torch.randn(shape).to(dtype) if delta else None
    check("silu_mul", (gate_up, added))
    check("silu_mul_quant", (gate_up, added, keep))


@pytest.mark.interpret
@pytest.mark.parametrize("width", [8960, 9000, 17000])
def test_wide_rows_of_one_cta(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with more tokens than are worth sharing among CTAs; a row of 17000 is read twice."""
    monkeypatch.setattr(sidestream.ops.elementwise.silu_mul, "SHARED_ROWS", 0)
    check("silu_mul_quant", (torch.randn(2, 2 * width).bfloat16(), torch.randn(2, 2 * width).bfloat16(), True))


@pytest.mark.interpret
def test_kernel_at_extreme_gates() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, 1.0, 2.0] + [1.0] * 8])
    check("silu_mul", (gate_up, None))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 200, 2048])
@pytest.mark.parametrize(
    ("width", "delta", "keep"),
    [(14336, True, True), (14336, False, False), (28672, False, True), (8224, True, False), (40, False, True)],
)
def test_kernel_on_the_gpu(tokens: int, width: int, delta: bool, keep: bool) -> None:
    gate_up = torch.randn(tokens, 2 * width, device="cuda", dtype=torch.bfloat16)
    added = torch.randn_like(gate_up) if delta else None
    check("silu_mul", (gate_up, added), pdl=keep)
    check("silu_mul_quant", (gate_up, added, keep), pdl=keep)


@pytest.mark.machine_code
@pytest.mark.parametrize("width", [8192, 14336, 28672])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("form", [(torch.float8_e4m3fn, 0), (torch.int8, 128)], ids=["e4m3", "rotated"])
def test_machine_code(width: int, delta: bool, form: tuple[torch.dtype, int]) -> None:
    many = torch.empty(300, 2 * width, device="meta", dtype=torch.bfloat16)
    (code,) = launched(silu_mul_quant, many, many if delta else None, True, *form, pdl=True)
    assert code.spills <= 2 and code.registers * code.num_warps * 32 <= 65536
    gate_up = many[:64]
    for code in launched(silu_mul_quant, gate_up, gate_up if delta else None, False, *form, pdl=True):
        assert code.spills == 0 and code.registers <= 40, "programs that wait next to the projection's"
    (code,) = launched(silu_mul, gate_up, gate_up if delta else None, pdl=True)
    assert code.spills == 0
