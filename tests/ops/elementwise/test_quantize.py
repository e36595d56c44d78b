"""`quantize_rowwise`: e4m3 or int8 with one scale a row."""

import pytest
import torch
from sidestream.ops.elementwise.quantize import quantize_rowwise, rotate_blocks, rotated_width
from support.checks import check_kernel
from support.samples import rotated_rows
from support.sm90 import launched


def test_reference_comes_back_within_half_a_step() -> None:
    x = torch.randn(32, 200) * torch.logspace(-3, 3, 32).unsqueeze(1)
    q, scale = quantize_rowwise(x)
    error = (q.float() * scale.unsqueeze(1) - x).abs()
    assert (error <= x.abs() * 2**-4 + scale.unsqueeze(1) * 2**-10).all()
    assert torch.equal(q.float().abs().amax(1), torch.full((32,), 448.0))


def test_reference_keeps_a_row_of_zeros_and_saturates_nothing_to_nan() -> None:
    q, scale = quantize_rowwise(torch.stack((torch.zeros(16), torch.full((16,), 3e38))))
    assert torch.equal(q.float(), torch.tensor([[0.0], [448.0]]).expand(2, 16))
    assert scale[0] > 0


def test_int8_comes_back_within_half_a_step_and_ties_go_to_even() -> None:
    x = torch.randn(32, 200) * torch.logspace(-3, 3, 32).unsqueeze(1)
    q, scale = quantize_rowwise(x, torch.int8)
    assert q.dtype == torch.int8 and q.abs().amax() == 127
    assert ((q.float() * scale.unsqueeze(1) - x).abs() <= scale.unsqueeze(1) * 0.5001).all()
    q, _ = quantize_rowwise(torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0]]), torch.int8)
    assert q.tolist() == [[127, 0, 2, -2, -127]]


@pytest.mark.parametrize(
    ("width", "rotate", "block"),
    [
        (128, 128, 128),
        (384, 128, 128),
        (96, 128, 32),
        (64, 128, 64),
        (24, 128, 8),
        (17, 128, 1),
        (384, 8, 8),
        (20, 8, 4),
        (24, 0, 1),
    ],
)
def test_blocks_are_rotated_by_the_hadamard_matrix(width: int, rotate: int, block: int) -> None:
    x = torch.randn(3, 2, width)
    assert rotated_width(width, rotate) == block
    torch.testing.assert_close(rotate_blocks(x, rotate).double(), rotated_rows(x, block), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotate_blocks(rotate_blocks(x, rotate), rotate), x)
    q, scale = quantize_rowwise(x, torch.int8, rotate)
    torch.testing.assert_close(scale.double() * 127, rotated_rows(x, block).abs().amax(-1), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(
        rotated_rows(q * scale.double().unsqueeze(-1), block), x.double(), rtol=0.0, atol=0.02 * block**0.5
    )


@pytest.mark.parametrize("rotate", [128, 8])
@pytest.mark.parametrize("width", [512, 96, 24, 17])
def test_rotated_rows_have_the_same_products(width: int, rotate: int) -> None:
    x, weight = torch.randn(4, width), torch.randn(8, width)
    torch.testing.assert_close(
        rotate_blocks(x, rotate) @ rotate_blocks(weight, rotate).T, x @ weight.T, rtol=1e-4, atol=1e-4
    )
    (q, scale), (w, w_scale) = (quantize_rowwise(each, torch.int8, rotate) for each in (x, weight))
    torch.testing.assert_close(
        (q.float() @ w.float().T) * scale.unsqueeze(1) * w_scale, x @ weight.T, rtol=0.0, atol=0.05 * width**0.5
    )


def test_a_spike_is_spread() -> None:
    x = torch.randn(4, 256)
    x[:, 5] = 50.0
    _, scale = quantize_rowwise(x, torch.int8, 128)
    assert (scale < 0.25 * 50 / 127).all()  # 50 / sqrt(128) and some


@pytest.mark.interpret
@pytest.mark.parametrize("rotate", [0, 8, 128])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 24), torch.bfloat16),
        ((2, 2, 96), torch.float32),
        ((3, 17), torch.float32),
        ((2, 640), torch.bfloat16),
        ((2, 17000), torch.bfloat16),
        ((1, 16512), torch.bfloat16),
    ],
)
def test_int8_kernel(shape: tuple[int, ...], dtype: torch.dtype, rotate: int) -> None:
    check_kernel(quantize_rowwise, torch.randn(shape).to(dtype), torch.int8, rotate)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 24), torch.bfloat16), ((2, 2, 96), torch.float32), ((2, 17000), torch.bfloat16)]
)
def test_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape) * torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    check_kernel(quantize_rowwise, x.to(dtype))


@pytest.mark.interpret
def test_kernel_rounds_every_e4m3_value_and_the_midpoints_as_torch_does() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].unique()
    midpoints = (values[1:] + values[:-1]) / 2
    # amax 448: the scale is 1
    x = torch.cat((values, midpoints, midpoints * (1 + 2**-20), midpoints * (1 - 2**-20))).unsqueeze(0)
    q, _ = quantize_rowwise.fake(x)
    quantize_rowwise.launch(x, out=(q, torch.empty(1)))
    # -0 and 0 are one value
    assert torch.equal(q.view(torch.uint8) & 0x7F, x.to(torch.float8_e4m3fn).view(torch.uint8) & 0x7F)
    assert torch.equal(q.float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form",
    [(torch.float8_e4m3fn, 0), (torch.int8, 0), (torch.int8, 8), (torch.int8, 128)],
    ids=["e4m3", "int8", "rotated", "wide"],
)
@pytest.mark.parametrize("tokens", [1, 3, 64, 200, 2048])
@pytest.mark.parametrize("width", [24, 17, 96, 1600, 3072, 4096, 14336, 28672])
def test_kernel_on_the_gpu(tokens: int, width: int, form: tuple[torch.dtype, int]) -> None:
    check_kernel(
        quantize_rowwise, torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16), *form, pdl=tokens % 2 == 0
    )


def test_a_strided_input_is_refused() -> None:
    x = torch.randn(4, 8)[:, :4]
    with pytest.raises(ValueError, match=r"x has strides \(8, 1\).*contiguous"):
        quantize_rowwise.launch(x, out=quantize_rowwise.fake(x))


@pytest.mark.machine_code
@pytest.mark.parametrize("form", [(torch.float8_e4m3fn, 0), (torch.int8, 128)], ids=["e4m3", "rotated"])
@pytest.mark.parametrize("width", [3072, 4096, 14336, 28672])
def test_machine_code(width: int, form: tuple[torch.dtype, int]) -> None:
    (code,) = launched(quantize_rowwise, torch.empty(64, width, device="meta", dtype=torch.bfloat16), *form, pdl=True)
    assert code.spills == 0 and code.registers * code.num_warps * 32 <= 65536
    assert code.ptx_count("bar.sync") <= 4, "the rotation leaves its warps"
