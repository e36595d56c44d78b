"""quantize_blocks: one scale per token and 128 columns; the kernel against the reference."""

import pytest
import torch
from sidestream.ops.elementwise.quantize_blocks import dequantize_blocks, padded_scales, quantize_blocks
from support.checks import Tolerance, check_kernel
from support.samples import rotated_rows
from support.sm90 import launched

SCALES = {1: Tolerance(1e-6)}


def test_each_block_is_scaled_by_its_own_maximum() -> None:
    x = torch.randn(5, 256) * torch.tensor([1.0, 1000.0]).repeat_interleave(128)
    q, scale = quantize_blocks(x)
    assert q.shape == x.shape and scale.shape == (2, 32)
    torch.testing.assert_close(scale[:, :5], x.view(5, 2, 128).abs().amax(-1).t() / 448)
    assert (scale[:, 5:] == 0).all()
    torch.testing.assert_close(dequantize_blocks(q, scale), x, rtol=2**-4, atol=1e-4)


def test_scales_are_padded_to_a_power_of_two() -> None:
    assert [padded_scales(tokens) for tokens in (1, 32, 33, 64, 200)] == [32, 32, 64, 64, 256]


def test_a_row_of_zeros_stays_zero() -> None:
    q, scale = quantize_blocks(torch.zeros(2, 128))
    assert not q.float().any() and (scale[:, :2] > 0).all()


def test_widths_that_are_no_whole_blocks_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(2, 100\).*multiple of 128"):
        quantize_blocks.fake(torch.zeros(2, 100))


def test_int8_blocks_come_back_within_half_a_step() -> None:
    x = torch.randn(5, 256) * torch.tensor([1.0, 1000.0]).repeat_interleave(128)
    q, scale = quantize_blocks(x, torch.int8)
    torch.testing.assert_close(scale[:, :5], x.view(5, 2, 128).abs().amax(-1).t() / 127)
    assert q.dtype == torch.int8
    assert ((dequantize_blocks(q, scale) - x).abs() <= 0.5001 * scale[:, :5].t().repeat_interleave(128, 1)).all()


def test_rotated_blocks_are_products_with_the_hadamard_matrix() -> None:
    x = torch.randn(5, 384)
    q, scale = quantize_blocks(x, torch.int8, 128)
    rotated = rotated_rows(x)
    torch.testing.assert_close(
        scale[:, :5].double() * 127, rotated.view(5, 3, 128).abs().amax(-1).t(), rtol=1e-6, atol=0.0
    )
    assert ((dequantize_blocks(q, scale) - rotated).abs() <= 0.5001 * scale[:, :5].t().repeat_interleave(128, 1)).all()


@pytest.mark.interpret
@pytest.mark.parametrize("rotate", [0, 8, 128])
def test_int8_kernel_in_the_interpreter(rotate: int) -> None:
    check_kernel(quantize_blocks, torch.randn(3, 384).to(torch.bfloat16), torch.int8, rotate, tolerances=SCALES)


@pytest.mark.interpret
@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (3, 384), (33, 256), (2, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_in_the_interpreter(tokens: int, width: int, dtype: torch.dtype) -> None:
    check_kernel(quantize_blocks, torch.randn(tokens, width).to(dtype), tolerances=SCALES)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form", [(torch.float8_e4m3fn, 0), (torch.int8, 8), (torch.int8, 128)], ids=["e4m3", "int8", "rotated"]
)
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_kernel_on_the_gpu(tokens: int, form: tuple[torch.dtype, int]) -> None:
    check_kernel(
        quantize_blocks, torch.randn(tokens, 4096, device="cuda").to(torch.bfloat16), *form, tolerances=SCALES, pdl=True
    )


def test_kernel_fits_in_registers() -> None:
    x = torch.empty(16, 4096, dtype=torch.bfloat16, device="meta")
    for form in ((torch.float8_e4m3fn, 0), (torch.int8, 128)):
        (code,) = launched(quantize_blocks, x, *form, pdl=True)
        assert code.spills == 0 and code.registers <= 64
