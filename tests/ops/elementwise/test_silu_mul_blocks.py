"""silu_mul_blocks: SiLU(gate) * up with one scale per token and 128 columns; the kernel against the reference."""

import pytest
import torch
from sidestream.ops.elementwise.quantize_blocks import quantize_blocks
from sidestream.ops.elementwise.silu_mul import silu_mul
from sidestream.ops.elementwise.silu_mul_blocks import silu_mul_blocks
from support.checks import Tolerance, check_kernel
from support.sm90 import launched

E4M3, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
FORMS = [(E4M3, 0), (INT8, 8), (INT8, 128)]
NAMES = ["e4m3", "rotated", "wide"]


def check(gate_up: torch.Tensor, delta: torch.Tensor | None, form: tuple[torch.dtype, int], **options: bool) -> None:
    # a value on a rounding edge of bf16 may lie one step from the reference's, and so may a block's largest
    bf16 = gate_up.dtype == BF16
    (_, scale) = check_kernel(
        silu_mul_blocks, gate_up, delta, *form, tolerances={1: Tolerance(2.0**-7 if bf16 else 2e-5)}, **options
    )
    assert (scale[:, gate_up.shape[0] :] == 0).all()


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("joined", [False, True])
def test_it_is_the_two_ops_after_each_other(form: tuple[torch.dtype, int], joined: bool) -> None:
    gate_up, delta = torch.randn(17, 512).to(BF16), torch.randn(17, 512).to(BF16) if joined else None
    q, scale = silu_mul_blocks(gate_up, delta, *form)
    expected = quantize_blocks(silu_mul(gate_up, delta), *form)
    assert q.dtype == form[0] and scale.shape == (2, 32)
    assert torch.equal(q.float(), expected[0].float()) and torch.equal(scale, expected[1])


@pytest.mark.parametrize(("shape", "delta"), [((2, 200), (2, 200)), ((2, 2, 256), (2, 2, 256)), ((2, 256), (3, 256))])
def test_other_shapes_are_named(shape: tuple[int, ...], delta: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=rf"gate_up {str(shape)[:-1][1:]}".replace("gate_up ", r"gate_up \(") + r"\).*multiple of 128"
    ):
        silu_mul_blocks.fake(torch.zeros(shape), torch.zeros(delta))


@pytest.mark.interpret
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize(
    ("tokens", "width", "joined"), [(1, 128, True), (17, 1152, False), (32, 384, True), (64, 256, True)]
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_kernel(dtype: torch.dtype, tokens: int, width: int, joined: bool, form: tuple[torch.dtype, int]) -> None:
    gate_up = (3 * torch.randn(tokens, 2 * width)).to(dtype)
    check(gate_up, torch.randn_like(gate_up) if joined else None, form)


@pytest.mark.interpret
def test_rows_of_zeros_stay_zero() -> None:
    (q, scale) = check_kernel(silu_mul_blocks, torch.zeros(2, 256), None, INT8, 128)
    assert not q.any() and (scale[:, :2] > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("tokens", [1, 17, 32, 64, 200])
@pytest.mark.parametrize(("width", "joined"), [(14336, True), (14336, False), (1152, True)])
def test_kernel_on_the_gpu(width: int, joined: bool, tokens: int, form: tuple[torch.dtype, int]) -> None:
    gate_up = torch.randn(tokens, 2 * width, device="cuda", dtype=BF16)
    check(gate_up, torch.randn_like(gate_up) if joined else None, form, pdl=joined)


@pytest.mark.machine_code
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_machine_code(form: tuple[torch.dtype, int], joined: bool) -> None:
    gate_up = torch.empty(64, 28672, device="meta", dtype=BF16)
    (code,) = launched(silu_mul_blocks, gate_up, gate_up if joined else None, *form, pdl=True)
    assert code.spills == 0 and code.registers <= 48, "programs that wait next to the projection's"
    assert code.ptx_count("ld.global.v4") == (4 if joined else 2), (
        "a thread's columns of the gate are not one load, or those of the up"
    )
    assert code.ptx_text.index("griddepcontrol.wait") < code.ptx_text.index("ld.global")
