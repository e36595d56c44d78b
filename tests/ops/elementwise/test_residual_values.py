"""`residual_values`: a residual stream as plain values."""

import pytest
import torch
from sidestream.ops.elementwise.residual_values import residual_values
from support.checks import EXACT, check_kernel
from support.sm90 import launched

BF16, F16 = torch.bfloat16, torch.float16


def test_sixteenths_become_whole_and_other_streams_stay_as_they_are() -> None:
    held = torch.tensor([[65504.0, -1.0, 2.0**-24, 0.1]], dtype=F16)
    assert torch.equal(residual_values(held, BF16), (held.double() * 16).to(BF16))
    assert torch.equal(residual_values(held, F16), held)
    assert torch.equal(residual_values(held.to(BF16), BF16), held.to(BF16))


@pytest.mark.interpret
@pytest.mark.parametrize(("stream", "dtype"), [(F16, BF16), (F16, F16), (BF16, BF16)])
@pytest.mark.parametrize("width", [96, 17])
def test_kernel(stream: torch.dtype, dtype: torch.dtype, width: int) -> None:
    check_kernel(residual_values, (20 * torch.randn(5, width)).to(stream), dtype, tolerances={0: EXACT})


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 2048])
@pytest.mark.parametrize("width", [4096, 3072, 1000])
def test_kernel_on_the_gpu(tokens: int, width: int) -> None:
    held = (2000 * torch.randn(tokens, width, device="cuda")).to(F16)
    for pdl in (False, True):
        check_kernel(residual_values, held, BF16, tolerances={0: EXACT}, pdl=pdl)


def test_machine_code() -> None:
    (code,) = launched(residual_values, torch.empty(64, 4096, device="meta", dtype=F16), BF16, pdl=True)
    assert code.spills == 0 and "LDG.E.128" in code.sass_text and code.ptx_count("griddepcontrol.wait") == 1
