"""linear_8bit: the reference against torch's own rowwise product, the kernels against the reference, the
configurations' sanity.
"""

import itertools

import pytest
import torch
from sidestream.ops.core.device import H200_SMS
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.ops.elementwise.quantize import quantize_rowwise
from sidestream.ops.linear import kernel_selection as tuning
from sidestream.ops.linear.kernel_selection import LinearConfig, work_split
from sidestream.ops.linear.linear_8bit import launch_config, linear_8bit, reference
from support.checks import Tolerance, assert_near, check_kernel, poison
from support.linears import BF16, E4M3, NEAR, SHAPES, check_chain, inputs, run, tolerance
from support.sm90 import MachineCode, compile_launch

FP32 = torch.float32
LLAMA_8B = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
TOKENS = (1, 8, 16, 64, 128, 256, 1000)


# The reference


def test_reference_is_torchs_rowwise_product() -> None:
    q, scale, weight, weight_scale, _, _ = inputs(5, 48, 64)
    try:
        expected = torch._scaled_mm(q, weight.t(), scale[:, None], weight_scale[None, :], out_dtype=BF16)
    except RuntimeError as problem:  # torch 2.11 on a CPU
        if "only supports per-tensor scaling" not in str(problem):
            raise
        pytest.skip("this torch's product has one scale a tensor")
    assert_near(linear_8bit(q, scale, weight, weight_scale, None, None, BF16), expected)


def test_reference_adds_before_it_rounds() -> None:
    q, scale, weight, weight_scale, delta, residual = inputs(3, 32, 64)
    product = linear_8bit(q, scale, weight, weight_scale, None, None, FP32)
    actual = linear_8bit(q, scale, weight, weight_scale, delta, residual, BF16)
    assert torch.equal(actual, (product + delta.float() + residual.float()).to(BF16))


def test_reference_takes_any_leading_dimensions() -> None:
    q, scale, weight, weight_scale, delta, residual = inputs(6, 48, 64)
    flat = linear_8bit(q, scale, weight, weight_scale, delta, residual, FP32)
    deep = linear_8bit(
        q.view(2, 3, 64), scale.view(2, 3), weight, weight_scale, delta.view(2, 3, 48), residual.view(2, 3, 48), FP32
    )
    assert torch.equal(deep, flat.view(2, 3, 48))
    assert linear_8bit(q[0], scale[0], weight, weight_scale, None, None, FP32).shape == (48,)
    assert linear_8bit(q[:0], scale[:0], weight, weight_scale, None, None, BF16).shape == (0, 48)


def test_misfits_are_named() -> None:
    q, scale, weight, weight_scale, _, _ = inputs(3, 32, 64)
    with pytest.raises(ValueError, match=r"\(3, 64\).*\(32, 48\)"):
        linear_8bit(q, scale, weight[:, :48], weight_scale, None, None, BF16)
    with pytest.raises(ValueError, match="weight_scale"):
        linear_8bit(q, scale, weight, weight_scale[:-1], None, None, BF16)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        linear_8bit(q.float(), scale, weight, weight_scale, None, None, BF16)
    out = torch.empty(3, 32, dtype=BF16)
    with pytest.raises(ValueError, match="multiple of 16"):
        linear_8bit.launch(q[:, :40], scale, weight[:, :40], weight_scale, None, None, BF16, out=(out,))


# Configurations


def shares(config: LinearConfig, tokens: int, n: int, k: int, sms: int) -> list[range]:
    """The units of each program, as the kernels compute them."""
    split = work_split(config, tokens, n, k, sms)
    steps, tiles = tuning.cdiv(k, config.block_k), tuning.cdiv(n, config.block_n) * tuning.cdiv(tokens, config.block_t)
    starts = [
        c * tiles * steps // split.programs if split.split else c * tiles // split.programs * steps
        for c in range(split.programs + 1)
    ]
    return [range(first, last) for first, last in itertools.pairwise(starts)]


@pytest.mark.parametrize("sms", [132, 99, 7])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_programs_share_all_units(n: int, k: int, sms: int) -> None:
    for tokens in (1, 16, 17, 100, 256):
        for config in {tuning.linear_config(tokens, n, k, 132), *tuning.candidates(tokens, n, k, 132)}:
            if config.kernel in ("scaled_mm", "wide"):
                continue
            split = work_split(config, tokens, n, k, sms)
            units = shares(config, tokens, n, k, sms)
            steps = tuning.cdiv(k, config.block_k)
            assert split.programs <= sms * config.ctas_per_sm
            assert units[0].start == 0 and units[-1].stop == steps * tuning.cdiv(n, config.block_n) * tuning.cdiv(
                tokens, config.block_t
            )
            assert all(share for share in units), "a program without work"
            owners: dict[int, int] = {}
            for share in units:
                for tile in range(share.start // steps, (share.stop - 1) // steps + 1):
                    owners[tile] = owners.get(tile, 0) + 1
            assert max(owners.values()) <= split.parts <= 2 * tuning.MAX_PARTS
            assert split.parts == 1 or max(map(len, units)) - min(map(len, units)) <= 1


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens", [*TOKENS, 5000])
def test_configurations_fit_the_gpu(tokens: int, n: int, k: int) -> None:
    config = tuning.linear_config(tokens, n, k, 132)
    if config.kernel == "scaled_mm":
        return
    ring = config.stages * (config.block_n + config.block_t) * config.block_k
    staging = (
        min(tuning.WIDE_STAGING, config.block_n * config.block_t * 2 // config.parts) if config.kernel == "wide" else 0
    )
    assert 0 < ring * config.ctas_per_sm + staging <= (226 if config.kernel == "wide" else 220) * 1024
    assert config.block_n in (64, 128, 256) and config.block_t >= 16 and config.warps in (4, 8)
    assert config.kernel == "wide" or (config.parts, config.promote) == (1, 0)
    assert config.kernel == "triton" or config.block_k == tuning.BLOCK_K


def test_the_table_is_read_and_used() -> None:
    for (n, k, tokens), config in tuning.tuned_table().items():
        assert tuning.linear_config(tokens, n, k, 132) == config
        assert tuning.linear_config(tokens - 1, n, k, 132) == config


# Machine code


def compiled(config: LinearConfig, dtype: torch.dtype = BF16) -> MachineCode:
    args = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs(16, 256, 1024)]
    out = torch.empty(16, 256, dtype=dtype, device="meta")
    (code,) = compile_launch(launch_config, config, *args, out, sms=132, pdl=True)
    return code


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize(
    "config",
    [
        LinearConfig("triton", 64, 16, split=True, ctas=7),
        LinearConfig("triton", 128, 128, stages=3, warps=8),
    ],
    ids=str,
)
def test_triton_kernel_compiles_to_wgmma(config: LinearConfig) -> None:
    code = compiled(config)
    assert code.spills == 0
    assert code.sass["QGMMA"] > 0 and code.sass["HMMA"] == 0
    assert code.sass["LDGSTS"] > 0, "the loads are not pipelined"
    assert code.ptx_count("prefetch.global.L2") > 0 and code.ptx_count("griddepcontrol.wait") == 1


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize(
    "config",
    [
        LinearConfig("gluon", 128, 16, stages=10, split=True, ctas=7, max_registers=128),
        LinearConfig("gluon", 64, 64, stages=8, max_registers=128),
        LinearConfig("gluon", 128, 128, stages=5, warps=8, max_registers=128),
    ],
    ids=str,
)
def test_gluon_kernel_compiles_to_wgmma_and_tma(config: LinearConfig) -> None:
    code = compiled(config)
    assert code.spills == 0
    assert code.sass["QGMMA"] > 0 and code.sass["UTMALDG"] > 0


# Kernels in the interpreter


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("tokens", "n", "k", "ctas", "split"),
    [
        (3, 100, 208, 4, True),  # neither N nor K a multiple of its block
        (20, 192, 256, 7, True),  # two token tiles, cut
        (17, 64, 512, 8, True),  # four programs on each tile
        (5, 130, 272, 2, False),
        (1, 64, 16, 5, True),
    ],
)
def test_triton_kernel(tokens: int, n: int, k: int, ctas: int, split: bool) -> None:
    config = LinearConfig("triton", 64, 16, ctas=ctas, split=split)
    args = inputs(tokens, n, k)
    for given in (args, (*args[:4], None, None), (*args[:4], args[4], None)):
        expected = reference(*given, FP32)
        actual = run(config, given, FP32)
        assert_near(actual, expected)
        assert torch.equal(actual, run(config, given, FP32)), "other bits at a second launch: a counter was left behind"
        assert_near(run(config, given, BF16), expected.to(BF16))


@pytest.mark.interpret
@pytest.mark.parametrize("tokens", [1, 18, 300])
def test_launch(tokens: int) -> None:
    check_kernel(linear_8bit, *inputs(tokens, 80, 144), BF16)


@pytest.mark.interpret
def test_launch_with_leading_dimensions_and_a_budget() -> None:
    q, scale, weight, weight_scale, delta, _ = inputs(6, 64, 256)
    check_kernel(
        linear_8bit,
        q.view(2, 3, 256),
        scale.view(2, 3),
        weight,
        weight_scale,
        delta.view(2, 3, 64),
        None,
        FP32,
        sm_budget=1,
    )
    check_kernel(linear_8bit, q[:0], scale[:0], weight, weight_scale, None, None, FP32)


# Kernels on the GPU


def near(tokens: int, n: int, k: int) -> Tolerance:
    return tolerance(tuning.linear_config(tokens, n, k, H200_SMS))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", LLAMA_8B)
def test_llama_shapes(name: str, tokens: int) -> None:
    args = inputs(tokens, *LLAMA_8B[name], device="cuda", addends=name != "lm_head")
    tolerances: dict[int | str, Tolerance] = {0: near(tokens, *LLAMA_8B[name])}
    check_kernel(linear_8bit, *args, BF16, tolerances=tolerances)
    check_kernel(linear_8bit, *args, BF16, tolerances=tolerances, sm_budget=99, pdl=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [(1, 256, 256), (5, 768, 256), (17, 1003, 256), (33, 100, 208), (200, 1032, 272), (300, 1001, 272), (700, 100, 16)],
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_odd_shapes(tokens: int, n: int, k: int, dtype: torch.dtype) -> None:
    args = inputs(tokens, n, k, device="cuda")
    for given in (args, (*args[:4], None, args[5]), (*args[:4], None, None)):
        check_kernel(linear_8bit, *given, dtype, tolerances={0: near(tokens, n, k)})
        check_kernel(linear_8bit, *given, dtype, tolerances={0: near(tokens, n, k)}, sm_budget=3, pdl=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["triton", "gluon"])
@pytest.mark.parametrize("ctas", [1, 5, 48, 131, 264])
def test_any_number_of_programs(kernel: tuning.Kernel, ctas: int) -> None:
    args = inputs(24, 1000, 2064, device="cuda")
    config = LinearConfig(kernel, 64, 16, stages=4, ctas_per_sm=2, ctas=ctas, split=True, max_registers=96)
    actual = run(config, args, FP32)
    assert_near(actual, reference(*args, FP32), NEAR)
    for _ in range(20):
        assert torch.equal(actual, run(config, args, FP32))


@pytest.mark.gpu
def test_tensors_that_tma_cannot_read() -> None:
    q, scale, weight, weight_scale, _, _ = inputs(9, 192, 256, device="cuda")
    shifted = torch.empty(weight.numel() + 8, dtype=E4M3, device="cuda")[8:].view_as(weight).copy_(weight)
    assert shifted.data_ptr() % 16
    out = poison(torch.empty(9, 192, dtype=BF16, device="cuda"))
    linear_8bit.launch(q, scale, shifted, weight_scale, None, None, BF16, out=(out,))
    assert_near(out, reference(q, scale, weight, weight_scale, None, None, BF16), NEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 200])
def test_a_chain_under_pdl_in_a_graph(tokens: int) -> None:
    check_chain(quantize_rowwise, E4M3, [inputs(1, 4096, 4096, device="cuda")[2:4] for _ in range(6)], tokens)
