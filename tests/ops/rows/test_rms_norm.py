"""The RMSNorm family against transformers' LlamaRMSNorm, and its kernel against the reference."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.rows.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from support.checks import EXACT, Tolerance, check_kernel
from support.sm90 import launched

# the statistics' last bit may flip x * rstd, and that the product
TWO_ROUNDINGS = Tolerance(2.0**-6, 1e-5, differing=0.02)
FROM_FLIPPED = Tolerance(2.0**-6, 0.0)  # a scale whose row maximum flipped
FP8_STEP = Tolerance(2.0**-3, 2.0**-9, differing=0.05)


def arguments(
    name: str, tokens: int, width: int, dtype: torch.dtype, delta: bool, keep: bool, device: str = "cpu"
) -> tuple[Any, ...]:
    def draw() -> torch.Tensor:
        return torch.randn(tokens, width, device=device).to(dtype)

    weight = (1 + 0.1 * torch.randn(width, device=device)).to(dtype)
    head = (draw(), draw(), draw() if delta else None) if name.startswith("add") else (draw(),)
    return (*head, weight, 1e-5, keep) if name.endswith("quant") else (*head, weight, 1e-5)


def check(name: str, args: tuple[Any, ...], **options: Any) -> None:
    bf16 = args[0].dtype == torch.bfloat16
    y = TWO_ROUNDINGS if bf16 else Tolerance(1e-5, 1e-5)
    positions = [y, FP8_STEP, FROM_FLIPPED if bf16 else Tolerance(1e-5)] if name.endswith("quant") else [y]
    if name.startswith("add"):
        positions.append(EXACT)
    check_kernel(OPS[name], *args, tolerances=dict(enumerate(positions)), **options)
    if name.endswith("quant"):
        positions[1] = Tolerance(0.0, 2.0, differing=0.05)  # steps of the row's scale, which may have flipped
        check_kernel(OPS[name], *args, torch.int8, 8, tolerances=dict(enumerate(positions)), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_transformers_norm(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight = torch.randn(5, 48).to(dtype), torch.randn(48).to(dtype)
    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data.copy_(weight)
    assert torch.equal(rms_norm(x, weight, 1e-5), norm(x))


def test_the_fused_ops_are_the_plain_ones_in_a_row() -> None:
    x, residual, delta, weight, eps, keep = arguments("add_rms_norm_quant", 4, 48, torch.bfloat16, True, True)
    y, q, scale, new_residual = add_rms_norm_quant(x, residual, delta, weight, eps, keep)
    assert torch.equal(new_residual, (x.float() + delta.float() + residual.float()).bfloat16())
    assert torch.equal(y, rms_norm(new_residual, weight, eps))
    assert all(
        torch.equal(a, b) for a, b in zip((y, q, scale), rms_norm_quant(new_residual, weight, eps, True), strict=True)
    )
    assert torch.equal(q, torch.ops.sidestream.quantize_rowwise(y)[0])
    assert torch.equal(y, add_rms_norm(x, residual, delta, weight, eps)[0])
    _, q, scale, _ = add_rms_norm_quant(x, residual, delta, weight, eps, keep, torch.int8, 8)
    assert all(
        torch.equal(a, b)
        for a, b in zip((q, scale), torch.ops.sidestream.quantize_rowwise(y, torch.int8, 8), strict=True)
    )


def test_an_unkept_y_is_empty() -> None:
    for name in ("rms_norm_quant", "add_rms_norm_quant"):
        assert OPS[name](*arguments(name, 4, 48, torch.bfloat16, False, False))[0].shape == (0, 48)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rms_norm_quant", "add_rms_norm_quant"])
@pytest.mark.parametrize(
    ("width", "delta", "keep"),
    [(64, False, True), (96, True, False), (256, False, False), (40, False, False), (17, False, True)],
)
def test_kernel(name: str, dtype: torch.dtype, width: int, delta: bool, keep: bool) -> None:
    check(name, arguments(name, 3, width, dtype, delta, keep))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 200, 2048])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rms_norm_quant", "add_rms_norm_quant"])
@pytest.mark.parametrize(
    ("width", "delta", "keep"), [(4096, True, True), (3072, False, False), (2080, True, False), (1000, False, True)]
)
def test_kernel_on_the_gpu(name: str, tokens: int, width: int, delta: bool, keep: bool) -> None:
    check(name, arguments(name, tokens, width, torch.bfloat16, delta, keep, "cuda"), pdl=keep)


@pytest.mark.gpu
def test_a_captured_chain_of_dependent_launches_gives_the_bits_of_single_launches() -> None:
    x, weight = torch.randn(64, 4096, device="cuda").bfloat16(), torch.randn(4096, device="cuda").bfloat16()
    single = [x]
    for _ in range(12):
        single.append(rms_norm(single[-1], weight, 1e-5))
    chain = [x, *(torch.full_like(x, float("nan")) for _ in range(12))]

    def run() -> None:
        for source, target in pairwise(chain):
            rms_norm.launch(source, weight, 1e-5, out=(target,), pdl=True)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        chain[-1].fill_(float("nan"))
        graph.replay()
        assert torch.equal(chain[-1], single[-1])


@pytest.mark.machine_code
@pytest.mark.parametrize("width", [3072, 4096, 8192, 16384])
def test_machine_code(width: int) -> None:
    x, weight = (
        torch.empty(64, width, device="meta", dtype=torch.bfloat16),
        torch.empty(width, device="meta", dtype=torch.bfloat16),
    )
    codes = [
        launched(add_rms_norm_quant, x, x, x, weight, 1e-5, True, *form, pdl=True)[0]
        for form in ((torch.int8, 0), (torch.int8, 8))
    ]
    for code in codes:
        assert code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1
    for exchange in ("ld.shared", "st.shared", "bar.sync"):
        assert codes[0].ptx_count(exchange) == codes[1].ptx_count(exchange), "the rotation leaves its warps"


def test_a_row_too_wide_for_one_cta_is_refused() -> None:
    x = torch.empty(2, 20000, device="meta")
    with pytest.raises(ValueError, match=r"20000.*at most 16384"):
        rms_norm.launch(x, x[0], 1e-5, out=(x,))
