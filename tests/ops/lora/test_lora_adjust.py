"""lora_adjust: the specification against the formula, unchanged bits, the kernel against it, its machine code."""

from typing import Any

import pytest
import torch
from sidestream.ops.lora.adjust import lora_adjust
from support.checks import Tolerance, bits, check_kernel
from support.samples import lora_adjust_inputs
from support.sm90 import launched

F32, BF16 = torch.float32, torch.bfloat16


def sylvester(width: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.double)
    while matrix.shape[0] < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.double), matrix)
    return matrix / width**0.5


def test_specification() -> None:
    y, gain, shift, index = lora_adjust_inputs(9, 40, dtype=F32)
    want = [
        y[t].double() if slot < 0 else (1 + gain[slot].double()) * y[t].double() + shift[slot].double()
        for t, slot in enumerate(index.tolist())
    ]
    torch.testing.assert_close(lora_adjust(y, gain, shift, index).double(), torch.stack(want), rtol=1e-5, atol=1e-6)


def test_the_gain_of_rotated_columns_applies_before_the_rotation() -> None:
    y, gain, shift, index = lora_adjust_inputs(9, 64, dtype=F32)
    turn = torch.eye(64, dtype=torch.double)
    turn[32:, 32:] = torch.block_diag(sylvester(16), sylvester(16))
    rotated = [(each.double() @ turn).float() for each in (y, shift)]
    got = lora_adjust(rotated[0], gain, rotated[1], index, 16, 32, 64).double() @ turn
    torch.testing.assert_close(got, lora_adjust(y, gain, shift, index).double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rotate", [(), (16, 16, 48)])
def test_zeros_change_no_bit(rotate: tuple[int, ...]) -> None:
    y, gain, shift, index = lora_adjust_inputs(40, 48)
    y[:, ::5] = -0.0
    got = lora_adjust(y, gain, shift, index, *rotate)
    assert torch.equal(bits(got[index <= 0]), bits(y[index <= 0])) and not got[index > 0].equal(y[index > 0])


CASES: list[tuple[tuple[int, int], dict[str, Any], tuple[int, ...]]] = [
    ((1, 8), {}, ()),
    ((5, 1500), {}, ()),  # columns of two programs, the second's not all there
    ((3, 384), {"parts": "gain"}, (64, 256, 384)),
    ((6, 2304), {}, (128, 896, 1152)),  # rotated columns of two programs
    ((4, 2048), {"parts": "shift"}, ()),
]


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("shape", "more", "rotate"), CASES)
def test_kernel(dtype: torch.dtype, shape: tuple[int, int], more: dict[str, Any], rotate: tuple[int, ...]) -> None:
    near = {0: Tolerance(2.0**-7 if dtype == BF16 else 1e-5, 4e-6)}
    check_kernel(lora_adjust, *lora_adjust_inputs(*shape, dtype=dtype, **more), *rotate, tolerances=near)


@pytest.mark.interpret
def test_kernel_keeps_the_bits_of_other_tokens() -> None:
    y, gain, shift, index = lora_adjust_inputs(8, 96)
    y[:, ::5] = -0.0
    out = torch.empty_like(y)
    lora_adjust.launch(y, gain, shift, index, 32, 32, 64, out=(out,))
    assert torch.equal(bits(out[index <= 0]), bits(y[index <= 0]))


def test_shapes_that_do_not_fit_are_refused() -> None:
    y, gain, shift, index = lora_adjust_inputs(3, 64)
    with pytest.raises(ValueError, match=r"expected fp32 \[S, 64\]"):
        lora_adjust.launch(y, gain[:, :32].contiguous(), shift, index, out=(y,))
    with pytest.raises(ValueError, match="columns 8 to 40 are not blocks of 16"):
        lora_adjust.launch(y, gain, shift, index, 16, 8, 40, out=(y,))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "n"), [(1, 6144), (64, 28672), (2048, 4096)])
def test_kernel_on_the_gpu(tokens: int, n: int) -> None:
    args = lora_adjust_inputs(tokens, n, slots=8, device="cuda")
    near = {0: Tolerance(2.0**-7, 4e-6)}
    for rotate in ((), (128, n - 1024, n)):
        check_kernel(lora_adjust, *args, *rotate, tolerances=near, pdl=True)


@pytest.mark.machine_code
@pytest.mark.parametrize("rotate", [0, 64, 128], ids=str)
def test_machine_code(rotate: int) -> None:
    meta = torch.device("meta")
    stack, index = torch.empty(8, 6144, device=meta), torch.empty(64, dtype=torch.int32, device=meta)
    y = torch.empty(64, 6144, dtype=BF16, device=meta)
    (code,) = launched(
        lora_adjust, y, stack, stack, index, rotate, 5120 if rotate else 0, 6144 if rotate else 0, pdl=True
    )
    assert code.spills == 0 and code.registers <= 64
