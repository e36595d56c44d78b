"""linear_8bit with a scale per token and 128 columns of its activations: the reference against plain sums, the
kernels against the reference.
"""

from typing import Any

import pytest
import torch
from sidestream.ops.core.device import H200_SMS
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.ops.elementwise.quantize_blocks import padded_scales, quantize_blocks
from sidestream.ops.linear import kernel_selection as tuning
from sidestream.ops.linear.kernel_selection import LinearConfig, linear_config, read_table, wide_config, work_split
from sidestream.ops.linear.linear_8bit import (
    has_block_scales,
    launch_config,
    linear_8bit,
    reference,
    takes_block_scales,
)
from support.checks import assert_near, check_kernel, poison
from support.linears import BF16, E4M3, INT8_DEVIATION, NEAR, check_chain, inputs, run
from support.sm90 import MachineCode, compile_launch, reads_under_way

FP32, INT8 = torch.float32, torch.int8
SHARED = 227 * 1024  # of an SM, for the rings
BOTH = pytest.mark.parametrize("dtype", [INT8, E4M3], ids=["int8", "e4m3"])


def block_inputs(
    tokens: int, n: int, k: int, dtype: torch.dtype, device: str = "cpu", addends: bool = True
) -> tuple[Any, ...]:
    """As `inputs`, with scales of blocks; NaN past the tokens, so that a result with one of them in it is seen."""
    q, _, *rest = inputs(tokens, n, k, device, addends, dtype)
    scale = poison(torch.empty(k // 128, padded_scales(tokens), device=device))
    scale[:, :tokens] = torch.rand(k // 128, tokens, device=device) + 0.5
    return (q, scale, *rest)


def tuned(dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """(tokens, N, K) of every measured shape of at most 64 tokens."""
    measured = {
        **read_table(tuning.TUNED, "linear_fp8"),
        **(read_table(tuning.TUNED, "linear_int8") if dtype == INT8 else {}),
    }
    return sorted((tokens, n, k) for n, k, tokens in measured if tokens <= 64)


def chosen(tokens: int, n: int, k: int, dtype: torch.dtype) -> LinearConfig:
    return takes_block_scales(linear_config(tokens, n, k, H200_SMS, int8=dtype == INT8), tokens, n, k, H200_SMS)


# The reference


@BOTH
def test_reference_scales_each_block(dtype: torch.dtype) -> None:
    q, scale, weight, weight_scale, delta, residual = block_inputs(5, 48, 384, dtype)
    total = sum(
        (q[:, at : at + 128].double() @ weight[:, at : at + 128].double().t()) * scale[at // 128, :5].double()[:, None]
        for at in (0, 128, 256)
    )
    total = total * weight_scale.double()
    assert_near(linear_8bit(q, scale, weight, weight_scale, None, None, FP32), total.float())
    assert_near(
        linear_8bit(q, scale, weight, weight_scale, delta, residual, FP32),
        (total + delta.double() + residual.double()).float(),
    )


@BOTH
def test_equal_scales_of_blocks_are_a_scale_of_the_row(dtype: torch.dtype) -> None:
    q, scale, *rest = inputs(7, 32, 256, dtype=dtype)
    assert_near(
        linear_8bit(q, torch.nn.functional.pad(scale, (0, 25)).repeat(2, 1), *rest, FP32),
        linear_8bit(q, scale, *rest, FP32),
    )
    # [2, 3] tokens: two dimensions too
    deep = linear_8bit(q[:6].view(2, 3, 256), scale[:6].view(2, 3), *rest[:2], None, None, FP32)
    assert_near(deep.view(6, 32), linear_8bit(q[:6], scale[:6], *rest[:2], None, None, FP32))


def test_misfits_are_named() -> None:
    q, scale, *rest = block_inputs(3, 32, 256, INT8, addends=False)
    for function in (reference, linear_8bit.fake):
        with pytest.raises(ValueError, match=r"scale \(3, 32\) doesn't match q \(3, 256\).*\[K / 128, P\]"):
            function(q, scale.new_zeros(3, 32), *rest, BF16)
        with pytest.raises(ValueError, match=r"\(2, 2\) has too few columns for 3 tokens.*padded_scales"):
            function(q, scale[:, :2], *rest, BF16)
        with pytest.raises(ValueError, match="multiple of 128"):
            function(q[:, :208], scale, rest[0][:, :208], *rest[1:], BF16)
    out = torch.empty(3, 32, dtype=BF16)
    with pytest.raises(ValueError, match=r"kernel wide needs one scale per token.*gluon and triton"):
        launch_config(wide_config(128, 64), q, scale, *rest, out, sms=132)
    with pytest.raises(ValueError, match=r"steps of 64 columns.*block_k=128"):
        launch_config(LinearConfig("triton", block_k=64), q, scale, *rest, out, sms=132)


# Configurations and machine code


@BOTH
def test_configurations(dtype: torch.dtype) -> None:
    for tokens, n, k in tuned(dtype):
        assert chosen(tokens, n, k, dtype).kernel in ("gluon", "triton")
    for tokens in (100, 256, 1000, 8192):
        for n, k in ((4096, 4096), (4096, 14336), (28672, 4096), (128, 128)):
            config = chosen(tokens, n, k, dtype)
            assert config.kernel == "gluon" and config.block_k == 128
            scales = config.stages * 4 * max(32, config.block_t)
            assert config.ctas_per_sm * (config.stages * (config.block_n + config.block_t) * 128 + scales) <= 225 * 1024
            assert work_split(config, tokens, n, k, 132).programs <= 132 * config.ctas_per_sm


def compiled(config: LinearConfig, tokens: int, n: int, k: int, dtype: torch.dtype) -> MachineCode:
    def meta(*shape: int, of: torch.dtype = FP32) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    args = (
        meta(tokens, k, of=dtype),
        meta(k // 128, padded_scales(tokens)),
        meta(n, k, of=dtype),
        meta(n),
        *(meta(tokens, n, of=BF16) for _ in range(3)),
    )
    (code,) = compile_launch(launch_config, config, *args, sms=132, pdl=True)
    return code


def tuned_shapes() -> list[tuple[torch.dtype, tuple[int, int, int]]]:
    """(dtype, tokens and sizes of a linear): one shape for each configuration that is launched."""
    found = {
        (dtype, chosen(*shape, dtype)): shape
        for dtype in (E4M3, INT8)
        for shape in [*tuned(dtype), (100, 4096, 4096), (300, 4096, 4096)]
    }
    return [(dtype, shape) for (dtype, _), shape in found.items()]


@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.machine_code(each="dtype")
@pytest.mark.parametrize(("dtype", "shape"), tuned_shapes(), ids=str)
def test_tuned_configurations_compile_without_spills(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    config = chosen(*shape, dtype)
    code = compiled(config, *shape, dtype)
    assert code.spills == 0, config
    # whole tiles of the Triton kernel need no other program: as many run on an SM as fit
    resident = 1 if config.kernel == "triton" and not config.split else config.ctas_per_sm
    assert code.shared_bytes * resident <= SHARED, config
    assert code.sass["IGMMA" if dtype == INT8 else "QGMMA"] > 0
    assert code.sass["UTMALDG"] >= 3 if config.kernel == "gluon" else code.sass["LDGSTS"] > 0
    assert reads_under_way(code) == []


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@BOTH
def test_triton_kernel_compiles_to_wgmma(dtype: torch.dtype) -> None:
    code = compiled(LinearConfig("triton", 64, 16, split=True, ctas=7), 16, 256, 1024, dtype)
    assert code.spills == 0 and code.sass["IGMMA" if dtype == INT8 else "QGMMA"] > 0 and code.sass["LDGSTS"] > 0


# Kernels in the interpreter


@pytest.mark.interpret
@BOTH
@pytest.mark.parametrize(
    ("tokens", "n", "k", "ctas", "split"),
    [
        (3, 100, 384, 4, True),  # N no multiple of its block
        (20, 192, 256, 7, True),  # two token tiles, cut
        (33, 64, 512, 9, True),  # three programs on each tile
        (5, 130, 256, 2, False),
        (1, 64, 128, 5, True),
    ],
)
def test_triton_kernel(tokens: int, n: int, k: int, ctas: int, split: bool, dtype: torch.dtype) -> None:
    config = LinearConfig("triton", 64, 16, ctas=ctas, split=split)
    args = block_inputs(tokens, n, k, dtype)
    for given in (args, (*args[:4], None, None), (*args[:4], args[4], None)):
        expected = reference(*given, FP32)
        actual = run(config, given, FP32)
        assert_near(actual, expected)
        assert torch.equal(actual, run(config, given, FP32)), "other bits at a second launch: a counter was left behind"
        assert_near(run(config, given, BF16), expected.to(BF16))


@pytest.mark.interpret
@BOTH
def test_row_scales_and_scales_of_blocks_take_turns(dtype: torch.dtype) -> None:
    """They share the planes' memory, in int8 with another dtype."""
    config = LinearConfig("triton", 64, 16, ctas=7, split=True)
    blocks, rows = block_inputs(9, 192, 256, dtype), inputs(9, 192, 256, dtype=dtype)
    for args in (blocks, rows, blocks):
        assert_near(run(config, args, FP32), reference(*args, FP32))


@pytest.mark.interpret
@BOTH
@pytest.mark.parametrize("tokens", [1, 18, 300])
def test_launch(tokens: int, dtype: torch.dtype) -> None:
    check_kernel(linear_8bit, *block_inputs(tokens, 80, 256, dtype), BF16)


@pytest.mark.interpret
def test_launch_with_a_budget_and_without_tokens() -> None:
    args = block_inputs(6, 64, 256, INT8)
    check_kernel(linear_8bit, *args, FP32, sm_budget=1)
    check_kernel(linear_8bit, args[0][:0], args[1], *args[2:4], None, None, FP32)
    tight = args[1][:, :6].contiguous()  # P is no more than the tokens, and no multiple of 4
    assert_near(linear_8bit(args[0], tight, *args[2:], FP32), linear_8bit(*args, FP32))
    check_kernel(linear_8bit, args[0], tight, *args[2:], FP32)


# Kernels on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "shape"), [(dtype, shape) for dtype in (INT8, E4M3) for shape in tuned(dtype)], ids=str
)
def test_tuned_shapes(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    most, n, k = shape
    assert has_block_scales(*block_inputs(1, 16, k, dtype)[:2])
    for tokens in (most, most // 2 + 1):
        args = block_inputs(tokens, n, k, dtype, device="cuda", addends=n < 100000)
        check_kernel(linear_8bit, *args, BF16, tolerances={0: NEAR})
        check_kernel(linear_8bit, *args[:4], None, None, BF16, tolerances={0: NEAR}, sm_budget=99, pdl=True)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [
        (1, 256, 256),
        (5, 771, 128),
        (33, 100, 384),
        (64, 49155, 2048),
        (65, 4096, 4096),
        (200, 1032, 2048),
        (1000, 4096, 14336),
    ],
)
def test_other_shapes(tokens: int, n: int, k: int, dtype: torch.dtype) -> None:
    args = block_inputs(tokens, n, k, dtype, device="cuda")
    for given in (args, (*args[:4], None, args[5])):
        check_kernel(linear_8bit, *given, FP32, tolerances={0: NEAR})
        check_kernel(linear_8bit, *given, BF16, tolerances={0: NEAR}, sm_budget=3, pdl=True)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize(
    "config",
    [
        LinearConfig("triton", 64, 16, stages=4, split=True),
        LinearConfig("gluon", 64, 16, stages=4, ctas_per_sm=2, split=True, max_registers=96),
        LinearConfig("gluon", 128, 32, stages=5, split=True, max_registers=168),
        LinearConfig("gluon", 64, 64, stages=7, split=True, max_registers=168),
    ],
    ids=str,
)
def test_several_token_tiles_have_their_own_scales(config: LinearConfig, dtype: torch.dtype) -> None:
    args = block_inputs(88, 1000, 2048, dtype, device="cuda")
    actual = run(config, args, FP32)
    assert_near(actual, reference(*args, FP32), NEAR)
    for _ in range(20):
        assert torch.equal(actual, run(config, args, FP32, pdl=True))


@pytest.mark.gpu
@BOTH
def test_scales_that_tma_cannot_read(dtype: torch.dtype) -> None:
    q, scale, *rest = block_inputs(9, 192, 256, dtype, device="cuda")
    shifted = torch.empty(scale.numel() + 1, device="cuda")[1:].view_as(scale).copy_(scale)
    for given in (shifted, scale[:, :9].contiguous()):
        out = poison(torch.empty(9, 192, dtype=BF16, device="cuda"))
        linear_8bit.launch(q, given, *rest, BF16, out=(out,))
        assert_near(out, reference(q, scale, *rest, BF16), NEAR)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_chain_under_pdl_in_a_graph(tokens: int, dtype: torch.dtype) -> None:
    gain = INT8_DEVIATION if dtype == INT8 else 1.0
    made = [inputs(1, 4096, 4096, device="cuda", dtype=dtype) for _ in range(6)]
    check_chain(
        quantize_blocks, dtype, [(weight, weight_scale * gain) for _, _, weight, weight_scale, *_ in made], tokens
    )
