"""decoder_block: the reference against plain arithmetic, the kernel's machine code, the kernel against the
reference.
"""

from typing import Any

import pytest
import torch
from sidestream.ops.core.registry import as_outputs
from sidestream.ops.decoder_block import decoder_block as module
from sidestream.ops.decoder_block import epilogues as pieces
from sidestream.ops.decoder_block import kernel
from sidestream.ops.decoder_block import producers as streams
from sidestream.ops.decoder_block.decoder_block import decoder_block, fits
from sidestream.ops.elementwise.quantize_blocks import dequantize_blocks
from support.checks import bits, poison
from support.gluon_threads import kernels_in_threads
from support.samples import decoder_block_inputs, exact
from support.sm90 import launched, reads_under_way

LLAMA_8B = (4096, 4096, 14336, 6144)
SMALL = (512, 512, 1024, 768)
SMS, SHARED = 132, 232448  # of an H200
FP8, INT8, BF16, FP16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float16
# How far two right answers may be apart. Sums in another order differ by 1e-6, those of the e4m3 tensor cores (14 bits)
# by 1e-4, and an activation on a rounding edge then falls to the other side, by a whole step. Noise of that size before
# each rounding moves the reference itself by up to 3.1% in e4m3 and 0.9% in int8 (one token; 2.5% and 0.6% for many),
# and its distance from the layer without roundings by a tenth.
NEAR = {FP8: 4e-2, INT8: 1.5e-2}
FURTHER = 1.2
# of the rotation, by tokens: four for each value that a thread has after gate_up
SHUFFLES = {1: 4 * 16, 32: 4 * 32, 64: 4 * 32}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))


def stream_of(held: torch.Tensor) -> torch.Tensor:
    """A residual stream's values: fp16 holds sixteenths."""
    return held.double() * (16 if held.dtype == FP16 else 1)


def plain(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same layer with nothing rounded, in fp64."""
    attention, scale, residual, *rest = args
    eps, norm_rotation = rest[10], rest[11] if len(rest) > 11 else 8
    o, gain, gate_up, down, next_gain = (
        exact(*rest[0:2]),
        rest[2].double(),
        exact(*rest[3:5], norm_rotation),
        exact(*rest[5:7], 128),
        rest[7].double(),
    )

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    x = stream_of(residual) + dequantize_blocks(attention, scale).double() @ o.t()
    gate, up = (norm(x, gain) @ gate_up.t()).chunk(2, -1)
    x = x + (torch.nn.functional.silu(gate) * up) @ down.t()
    return (norm(x, next_gain) @ exact(*rest[8:10], norm_rotation).t() if rest[8] is not None else x[:, :0]), x


# The reference


@pytest.mark.parametrize(("dtype", "off"), [(FP8, 0.06), (INT8, 0.015)])  # e4m3 rounds by 2.5% (rms), int8 by 0.6%
@pytest.mark.parametrize("norm_rotation", [8, 64])
def test_reference_is_the_layer_up_to_rounding(dtype: torch.dtype, off: float, norm_rotation: int) -> None:
    args = (*decoder_block_inputs(5, 512, 256, 512, 384, dtype=dtype), norm_rotation)
    qkv, residual = decoder_block(*args)
    want_qkv, want_residual = plain(args)
    assert qkv.shape == (5, 384) and qkv.dtype == residual.dtype == torch.bfloat16
    assert relative(residual, want_residual) < off / 2 and relative(qkv, want_qkv) < off


def test_a_scaled_stream_is_nearer_to_the_layer_than_one_in_bf16() -> None:
    attention, scale, residual, *rest = decoder_block_inputs(5, 512, 256, 512, 384, dtype=INT8)
    # 64 times what the layer adds, as streams of real models grow
    residual = 64 * residual
    errors = {}
    for dtype, held in ((BF16, residual), (FP16, (residual.double() / 16).to(FP16))):
        qkv, after = decoder_block(attention, scale, held, *rest)
        want_qkv, want = plain((attention, scale, held, *rest))
        assert qkv.dtype == BF16 and after.dtype == dtype and relative(qkv, want_qkv) < 0.015
        errors[dtype] = relative(stream_of(after), want)
    assert errors[FP16] < 0.2 * errors[BF16]


def test_without_a_projection_after_it_the_residual_is_the_same() -> None:
    args = decoder_block_inputs(3, 512, 256, 512, 128)
    qkv, residual = decoder_block(*args[:-3], None, None, args[-1])
    assert qkv.shape == (3, 0) and torch.equal(residual, decoder_block(*args)[1])


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((1, *LLAMA_8B), None),
        ((64, *LLAMA_8B[:3], 0), None),
        ((65, *LLAMA_8B), "65 tokens"),
        ((1, 4096, 8192, 28672, 10240), "256 CTAs must be resident at once, but the GPU has 132 SMs"),
        ((1, 4096, 4096, 14400, 6144), "intermediate size 14400 is not a multiple of 512"),
        ((1, 4096, 4096, 14336, 128256), "2004 CTAs"),
        ((1, 1024, 1024, 8192, 3072), "gives 32 CTAs, but the other projections need 64"),
    ],
)
def test_sizes_that_do_not_fit_are_told(sizes: tuple[int, ...], reason: str | None) -> None:
    objection = fits(*sizes, SMS)  # type: ignore[arg-type]
    assert objection is None if reason is None else reason in (objection or "")


def test_a_smaller_budget_of_sms_is_refused() -> None:
    args = decoder_block_inputs(1, *SMALL)
    with pytest.raises(
        ValueError, match=r"16 CTAs must be resident at once, but the GPU has 8 SMs; compile with whole_layer='off'"
    ):
        decoder_block.launch(*args, out=as_outputs(decoder_block.fake(*args)), sm_budget=8)


def test_mixed_dtypes_are_refused() -> None:
    args = list(decoder_block_inputs(1, *SMALL))
    args[8] = args[8].to(INT8)
    with pytest.raises(
        ValueError, match=r"attention torch.float8_e4m3fn.*down_weight torch.int8.*; quantize all of them to"
    ):
        decoder_block.launch(*args, out=as_outputs(decoder_block.fake(*args)))


# Machine code


@pytest.mark.machine_code
@pytest.mark.parametrize("tokens", [1, 32, 64])
def test_kernel_streams_by_tma_and_multiplies_by_wgmma(tokens: int) -> None:
    codes = []
    for dtype, stream, tensor_core in ((FP8, BF16, "QGMMA"), (INT8, FP16, "IGMMA")):  # as a model's programs have it
        args = decoder_block_inputs(tokens, *LLAMA_8B, device="meta", dtype=dtype, stream=stream)
        (code,) = launched(decoder_block, *args, pdl=True)
        assert code.spills == 0 and code.local_bytes == 0 and code.shared_bytes <= SHARED
        assert code.registers * code.num_warps * 32 <= 65536
        assert code.ptx_count("cp.async.bulk.tensor") > 0 and code.ptx_count("griddepcontrol") == 3
        assert code.sass[tensor_core] > 0 and code.sass["HMMA"] == 0
        assert reads_under_way(code) == []
        codes.append(code)
    for exchange in ("ld.shared", "st.shared", "bar"):
        assert codes[0].ptx_count(exchange) == codes[1].ptx_count(exchange), "the rotation leaves its warps"
    assert codes[1].ptx_count("shfl") - codes[0].ptx_count("shfl") == SHUFFLES[tokens], (
        "other than four shuffles a value"
    )


@pytest.mark.machine_code
def test_wider_rotations_after_norms_take_no_stack() -> None:
    args = (*decoder_block_inputs(32, *LLAMA_8B, device="meta", dtype=INT8, stream=FP16), 64)
    (code,) = launched(decoder_block, *args, pdl=True)
    assert code.spills == 0 and code.local_bytes == 0 and code.shared_bytes <= SHARED
    assert code.registers * code.num_warps * 32 <= 65536


# The kernel's own code, in threads on the CPU


@pytest.mark.parametrize(
    ("tokens", "sizes", "dtype", "stream"),
    [
        (1, SMALL, FP8, BF16),
        (17, SMALL, FP8, BF16),
        (64, SMALL, FP8, BF16),
        (5, (*SMALL[:3], 0), FP8, BF16),
        (20, (1024, 2048, 2048, 1536), FP8, BF16),
        (1, SMALL, INT8, BF16),
        (33, SMALL, INT8, FP16),
        (5, (*SMALL[:3], 0), INT8, FP16),
    ],
    ids=str,
)
def test_kernel_in_threads_is_the_reference(
    tokens: int, sizes: tuple[int, ...], dtype: torch.dtype, stream: torch.dtype
) -> None:
    args: tuple[Any, ...] = decoder_block_inputs(tokens, *sizes, dtype=dtype, stream=stream)
    if tokens == 33:
        args = (*args, 64)
    out = tuple(poison(tensor) for tensor in as_outputs(decoder_block.fake(*args)))
    with kernels_in_threads(module, kernel, pieces, streams):
        decoder_block.launch(*args, out=out)
    for got, right in zip(out, decoder_block.reference(*args), strict=True):
        assert torch.isfinite(got.float()).all() and (not right.numel() or relative(got, right) < NEAR[dtype])


def test_kernel_in_threads_cuts_a_scaled_stream_off_at_its_end() -> None:
    args = huge_stream("cpu")
    out = tuple(poison(tensor) for tensor in as_outputs(decoder_block.fake(*args)))
    with kernels_in_threads(module, kernel, pieces, streams):
        decoder_block.launch(*args, out=out)
    check_ends(out[1], args)


def huge_stream(device: str) -> tuple[Any, ...]:
    """Arguments in int8 with a stream near the end of what it holds, and a NaN."""
    attention, scale, residual, *rest = decoder_block_inputs(2, *SMALL, device=device, dtype=INT8, stream=FP16)
    residual[0, 3:5] = torch.tensor([65504.0, -65504.0])
    residual[1, 7] = float("nan")
    o_scale = rest[1]
    o_scale[3:5] = 1e8  # what o adds to these
    return attention, scale, residual, *rest


def check_ends(after: torch.Tensor, args: tuple[Any, ...]) -> None:
    update = (dequantize_blocks(*args[:2]).double() @ exact(*args[3:5]).t())[0, 3:5]
    want = torch.where(update < 0, -65504.0, 65504.0)
    for found in (after, decoder_block.reference(*args)[1]):
        assert torch.equal(found[0, 3:5].double(), want) and torch.isfinite(found[0].float()).all()
        assert found[1, 7].isnan()


# On a GPU


def launch(args: tuple[Any, ...], **options: Any) -> tuple[torch.Tensor, ...]:
    out = tuple(poison(tensor) for tensor in as_outputs(decoder_block.fake(*args)))
    decoder_block.launch(*args, out=out, **options)
    torch.cuda.synchronize()
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [LLAMA_8B, (*LLAMA_8B[:3], 0), SMALL, (1024, 2048, 4096, 1536)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 33, 64])
@pytest.mark.parametrize(
    ("dtype", "norm_rotation", "stream"),
    [(FP8, 8, BF16), (INT8, 8, BF16), (INT8, 8, FP16), (INT8, 64, FP16), (INT8, 128, FP16)],
)
def test_kernel_is_the_reference(
    sizes: tuple[int, ...], tokens: int, dtype: torch.dtype, norm_rotation: int, stream: torch.dtype
) -> None:
    args = (*decoder_block_inputs(tokens, *sizes, device="cuda", dtype=dtype, stream=stream), norm_rotation)
    want = decoder_block.reference(*args)
    first, second = launch(args), launch(args, pdl=True)
    # Exact they are equally: no further from the layer without roundings than the reference is.
    for got, again, right, unrounded in zip(first, second, want, plain(args), strict=True):
        assert torch.equal(bits(got), bits(again)), "other bits at a second launch"
        if right.numel():
            assert torch.isfinite(got.float()).all() and relative(got, right) < NEAR[dtype]
            got, right = (stream_of(each) for each in (got, right))
            assert relative(got, unrounded) < FURTHER * relative(right, unrounded) + 1e-4


@pytest.mark.gpu
def test_a_scaled_stream_is_cut_off_at_its_end() -> None:
    args = huge_stream("cuda")
    check_ends(launch(args)[1], args)


@pytest.mark.gpu
def test_token_counts_may_follow_each_other_in_any_order() -> None:
    """Each launch finds its counters as it needs them, whatever ran before, of either dtype."""
    cases = {
        tokens: decoder_block_inputs(tokens, *SMALL, device="cuda", dtype=INT8 if tokens in (3, 64) else FP8)
        for tokens in (1, 64, 3, 17)
    }
    alone = {tokens: launch(args) for tokens, args in cases.items()}
    for tokens in (64, 1, 1, 3, 64, 17, 17, 1, 3):
        for got, want in zip(launch(cases[tokens], pdl=True), alone[tokens], strict=True):
            assert torch.equal(bits(got), bits(want))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "stream"), [(FP8, BF16), (INT8, FP16)])
def test_a_chain_in_a_graph_gives_the_same_bits_many_times(dtype: torch.dtype, stream: torch.dtype) -> None:
    layers = [decoder_block_inputs(16, *SMALL, device="cuda", dtype=dtype, stream=stream) for _ in range(6)]
    outs = [as_outputs(decoder_block.fake(*args)) for args in layers]

    def step() -> None:
        residual = layers[0][2]
        for args, out in zip(layers, outs, strict=True):
            decoder_block.launch(*args[:2], residual, *args[3:], out=out, pdl=True)
            residual = out[1]

    step()
    torch.cuda.synchronize()
    want = outs[-1][0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(300):
        poison(outs[-1][0])
        graph.replay()
        assert torch.equal(outs[-1][0], want)
