"""The RMSNorm family against transformers' LlamaRMSNorm, and its kernel against the reference; with the residual
stream as sixteenths in fp16 too.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from sidestream.ops.core.registry import OPS, as_outputs
from sidestream.ops.elementwise.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from support.checks import EXACT, Tolerance, check_kernel
from support.sm90 import launched

# the statistics' last bit may flip x * rstd, and that the product
TWO_ROUNDINGS = Tolerance(2.0**-6, 1e-5, differing=0.02)
FROM_FLIPPED = Tolerance(2.0**-6, 0.0)  # a scale after a flip of the row maximum
FP8_STEP = Tolerance(2.0**-3, 2.0**-9, differing=0.05)


def arguments(
    name: str,
    tokens: int,
    width: int,
    dtype: torch.dtype,
    delta: bool,
    keep: bool,
    device: str = "cpu",
    stream: torch.dtype | None = None,
) -> tuple[Any, ...]:
    def draw() -> torch.Tensor:
        return torch.randn(tokens, width, device=device).to(dtype)

    weight = (1 + 0.1 * torch.randn(width, device=device)).to(dtype)
    residual = draw() if stream is None else (20 * torch.randn(tokens, width, device=device)).to(stream)
    head = (draw(), residual, draw() if delta else None) if name.startswith("add") else (residual,)
    return (*head, weight, 1e-5, keep) if name.endswith("quant") else (*head, weight, 1e-5)


def check(name: str, args: tuple[Any, ...], **options: Any) -> None:
    bf16 = as_outputs(OPS[name].fake(*args))[0].dtype == torch.bfloat16
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
    # the last bit follows the order of the sum
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), norm(x), rtol=4 * torch.finfo(dtype).eps, atol=0.0)


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


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rms_norm_quant", "add_rms_norm_quant"])
@pytest.mark.parametrize(("width", "delta", "keep"), [(96, True, False), (17, False, True)])
def test_kernel_of_a_scaled_stream(name: str, width: int, delta: bool, keep: bool) -> None:
    check(name, arguments(name, 3, width, torch.bfloat16, delta, keep, stream=torch.float16))


def test_a_scaled_stream_is_rounded_to_fp16_of_its_sixteenth() -> None:
    x, residual, delta, weight, eps, keep = arguments(
        "add_rms_norm_quant", 4, 48, torch.bfloat16, True, True, stream=torch.float16
    )
    y, q, scale, new_residual = add_rms_norm_quant(x, residual, delta, weight, eps, keep)
    total = x.float() + delta.float() + 16 * residual.float()
    assert new_residual.dtype == torch.float16 and torch.equal(new_residual, (total / 16).half())
    assert y.dtype == torch.bfloat16 and torch.equal(y, rms_norm(new_residual, weight, eps))
    # the same values in fp32, where the norm rounds last: one step of bf16 each way
    wide = torch.nn.functional.rms_norm(16 * new_residual.float(), (48,), weight.float(), eps)
    assert torch.allclose(y.float(), wide, rtol=2.0**-7, atol=0.0)
    assert all(
        torch.equal(a, b) for a, b in zip((y, q, scale), rms_norm_quant(new_residual, weight, eps, True), strict=True)
    )


def test_a_model_in_fp16_has_an_unscaled_stream() -> None:
    x, residual, delta, weight, eps = arguments("add_rms_norm", 4, 48, torch.float16, True, True)
    new_residual = add_rms_norm(x, residual, delta, weight, eps)[1]
    assert torch.equal(new_residual, (x.float() + delta.float() + residual.float()).half())


def saturating(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Arguments of add_rms_norm with sums beyond scaled fp16, and the expected results."""
    x = torch.zeros(2, 32, device=device)
    x[0, :5] = torch.tensor([1.5e6, -1.5e6, 1048064.0, 1048576.0, 1e38])
    x[1, 3] = float("nan")
    want = torch.zeros(2, 32, device=device, dtype=torch.float16)
    want[0, :5] = torch.tensor([65504.0, -65504.0, 65504.0, 65504.0, 65504.0])
    want[1, 3] = float("nan")
    residual, weight = torch.zeros_like(want), torch.ones(32, device=device, dtype=torch.bfloat16)
    return x.bfloat16(), residual, weight, want


def check_saturation(device: str) -> None:
    x, residual, weight, want = saturating(device)
    out = torch.empty_like(x), torch.empty_like(residual)
    add_rms_norm.launch(x, residual, None, weight, 1e-5, out=out)
    for y, held in (out, add_rms_norm.reference(x, residual, None, weight, 1e-5)):
        assert torch.equal(held.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))
        assert torch.isfinite(y[0].float()).all() and y[1].isnan().all()


@pytest.mark.interpret
def test_a_scaled_stream_is_cut_off_at_its_end() -> None:
    check_saturation("cpu")


@pytest.mark.gpu
def test_a_scaled_stream_is_cut_off_at_its_end_on_the_gpu() -> None:
    check_saturation("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("stream", [None, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 64, 200, 2048])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rms_norm_quant", "add_rms_norm_quant"])
@pytest.mark.parametrize(
    ("width", "delta", "keep"), [(4096, True, True), (3072, False, False), (2080, True, False), (1000, False, True)]
)
def test_kernel_on_the_gpu(
    name: str, tokens: int, width: int, delta: bool, keep: bool, stream: torch.dtype | None
) -> None:
    check(name, arguments(name, tokens, width, torch.bfloat16, delta, keep, "cuda", stream), pdl=keep)


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
        launched(add_rms_norm_quant, x, residual, x, weight, 1e-5, True, *form, pdl=True)[0]
        for residual, form in ((x, (torch.int8, 0)), (x, (torch.int8, 8)), (x.half(), (torch.int8, 8)))
    ]
    codes += launched(rms_norm_quant, x.half(), weight, 1e-5, True, torch.int8, 8, pdl=True)
    for code in codes:
        assert code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1
    for exchange in ("ld.shared", "st.shared", "bar.sync"):
        counts = {code.ptx_count(exchange) for code in codes[:3]}
        assert len(counts) == 1, "the rotation leaves its warps"
    for code in codes[2:]:
        assert "ld.global.b16" not in code.ptx_text and "st.global.b16" not in code.ptx_text


def test_a_row_too_wide_for_one_cta_is_refused() -> None:
    x = torch.empty(2, 20000, device="meta")
    with pytest.raises(ValueError, match=r"20000.*at most 16384"):
        rms_norm.launch(x, x[0], 1e-5, out=(x,))
