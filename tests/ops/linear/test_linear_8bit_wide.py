"""The wide kernel: whole and shared tiles, SiLU in the epilogue; every entry of the tuned table against its
reference.
"""

from typing import Any

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.ops.elementwise.silu_mul import silu_mul
from sidestream.ops.linear import kernel_selection as tuning
from sidestream.ops.linear.kernel_selection import LinearConfig, work_split
from sidestream.ops.linear.kernel_wide import launch_wide
from sidestream.ops.linear.linear_8bit import linear_8bit, reference
from sidestream.ops.linear.linear_8bit_silu_mul import linear_8bit_silu_mul
from support.checks import assert_near, check_kernel, poison
from support.linears import BF16, E4M3, SHAPES, inputs, run, tolerance
from support.sm90 import compile_launch

FP32 = torch.float32


def test_the_activation_is_the_two_ops_in_one() -> None:
    q, scale, weight, weight_scale, delta, _ = inputs(5, 96, 64)
    for added in (None, delta):
        packed = linear_8bit(q, scale, weight, weight_scale, added, None, FP32)
        assert_near(linear_8bit_silu_mul(q, scale, weight, weight_scale, added, FP32), silu_mul(packed, None))
    with pytest.raises(ValueError, match="even number of rows"):
        linear_8bit_silu_mul(q, scale, weight[:95], weight_scale[:95], None, BF16)


def wide_units(config: LinearConfig, tokens: int, n: int, k: int, sms: int) -> list[list[tuple[int, int]]]:
    """The (tile, step) pairs of each program of the wide kernel, as it computes them."""
    split = work_split(config, tokens, n, k, sms)
    steps, tiles = tuning.cdiv(k, config.block_k), tuning.cdiv(n, config.block_n) * tuning.cdiv(tokens, config.block_t)
    if split.split:
        cuts = [part * steps // split.parts for part in range(split.parts + 1)]
        return [
            [(p // split.parts, step) for step in range(cuts[p % split.parts], cuts[p % split.parts + 1])]
            for p in range(split.programs)
        ]
    return [
        [(tile, step) for tile in range(p, tiles, split.programs) for step in range(steps)]
        for p in range(split.programs)
    ]


@pytest.mark.parametrize("sms", [132, 99, 7])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_wide_programs_share_all_units(n: int, k: int, sms: int) -> None:
    for tokens in (65, 128, 200, 512):
        for config in tuning.wide_candidates(tokens, n, 132):
            programs = wide_units(config, tokens, n, k, sms)
            assert len(programs) <= sms, "programs that wait for each other need an SM each"
            assert all(programs), "a program without work"
            units = [unit for program in programs for unit in program]
            tiles = tuning.cdiv(n, config.block_n) * tuning.cdiv(tokens, config.block_t)
            assert len(units) == len(set(units)) == tiles * tuning.cdiv(k, config.block_k)


@pytest.mark.parametrize(("n", "k"), [(5120, 5120), (2048, 8192), (9728, 2560), (57344, 8192)])
@pytest.mark.parametrize("tokens", [65, 100, 128, 250])
def test_shapes_that_nobody_measured(n: int, k: int, tokens: int) -> None:
    assert (n, k, tuning.padded_tokens(tokens)) not in tuning.tuned_table()
    config = tuning.linear_config(tokens, n, k, 132)
    if config.kernel == "wide":
        assert 0.6 * 132 <= work_split(config, tokens, n, k, 132).programs <= 132
    else:
        assert config.kernel == "scaled_mm" or tokens <= 128
    assert tuning.linear_config(tokens, n, k, 132, scaled_mm=False).kernel in ("gluon", "triton")
    assert tuning.without_tma(config).kernel == "triton"


def test_each_gpu_has_its_table() -> None:
    assert tuning.gpu_slug("NVIDIA H200") == "h200" and tuning.gpu_slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"
    assert (
        tuning.table_path("NVIDIA H200")
        == tuning.TUNED
        == tuning.table_path("some GPU without a table")
        == tuning.table_path(None)
    )


@pytest.mark.machine_code
@pytest.mark.skipif(INTERPRETED, reason="compiles for the GPU")
@pytest.mark.parametrize("activate", [False, True])
@pytest.mark.parametrize(
    ("block_t", "block_n", "parts", "promote"),
    [(128, 256, 1, 0), (256, 128, 1, 0), (128, 256, 4, 0), (128, 128, 2, 4), (128, 64, 2, 4)],
)
def test_wide_kernel_compiles_without_spills(
    block_t: int, block_n: int, parts: int, promote: int, activate: bool
) -> None:
    if activate and parts > 1:
        pytest.skip("tiles with an activation are whole")
    config = tuning.wide_config(block_t, block_n, parts, promote)
    q, scale, weight, weight_scale, delta, _ = (
        torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs(256, 4096, 1024)
    )
    out = torch.empty(256, 4096 // (2 if activate else 1), dtype=BF16, device="meta")
    split = work_split(config, 256, 4096, 1024, 132)
    (code,) = compile_launch(
        launch_wide,
        q,
        scale,
        weight,
        weight_scale,
        None if activate else delta,
        None,
        out,
        config,
        split,
        True,
        activate,
    )
    assert code.spills == 0 and code.shared_bytes <= 227 * 1024
    assert code.sass["QGMMA"] > 0 and code.sass["UTMALDG"] > 0 and code.sass["UTMASTG"] > 0


@pytest.mark.interpret
def test_activation_launch() -> None:
    q, scale, weight, weight_scale, delta, _ = inputs(18, 96, 144)
    for added in (None, delta):
        check_kernel(linear_8bit_silu_mul, q, scale, weight, weight_scale, added, FP32)


ENTRIES = [
    (op, *entry)
    for op in ("linear_fp8", "linear_fp8_silu_mul", "linear_int8", "linear_int8_silu_mul")
    for entry in tuning.read_table(tuning.TUNED, op)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "n", "k", "entry"), ENTRIES)
def test_every_entry_of_the_table(op: str, n: int, k: int, entry: int) -> None:
    """Right on fresh data, and the same bits twice, for a full and a partly filled token tile, with and without
    addends and a budget of SMs.
    """
    config = tuning.read_table(tuning.TUNED, op)[n, k, entry]
    dtype, name = (torch.int8, op.replace("int8", "8bit")) if "int8" in op else (E4M3, op.replace("fp8", "8bit"))
    for tokens, addends in ((entry, False), (entry - entry // 4 - 1, True)):
        q, scale, weight, weight_scale, delta, residual = inputs(
            tokens, n, k, device="cuda", addends=addends, dtype=dtype
        )
        args: tuple[Any, ...] = (
            (q, scale, weight, weight_scale, delta, BF16)
            if "silu" in op
            else (q, scale, weight, weight_scale, delta, residual, BF16)
        )
        expected = OPS[name].reference(*args)
        for options in ({"pdl": True}, {"sm_budget": 99}):
            results = []
            for _ in range(3):
                out = poison(torch.empty_like(expected))
                OPS[name].launch(*args, out=(out,), **options)
                results.append(out)
            assert_near(results[0], expected, tolerance(config, dtype))
            assert all(torch.equal(results[0], other) for other in results[1:]), "other bits at another launch"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "n", "k", "block_t", "block_n", "parts"),
    [
        (65, 4096, 4096, 128, 128, 2),
        (250, 1000, 2064, 256, 128, 4),
        (130, 1024, 528, 128, 64, 2),
        (300, 5000, 1040, 128, 256, 1),
        (100, 264, 144, 128, 64, 4),
    ],
)
@pytest.mark.parametrize("promote", [0, 3])
def test_wide_kernel(tokens: int, n: int, k: int, block_t: int, block_n: int, parts: int, promote: int) -> None:
    if promote and block_t * block_n > 128 * 128:
        pytest.skip("two sums of such a tile don't fit the registers")
    config = tuning.wide_config(block_t, block_n, parts, promote)
    args = inputs(tokens, n, k, device="cuda")
    for given in (args, (*args[:4], None, args[5]), (*args[:4], None, None)):
        actual = run(config, given, BF16)
        assert_near(actual, reference(*given, BF16), tolerance(config))
        for options in ({"pdl": True}, {"sm_budget": 5}) * 3:
            again = run(config, given, BF16, **options)
            if "pdl" in options:
                assert torch.equal(actual, again)
            else:
                assert_near(again, actual, tolerance(config))
