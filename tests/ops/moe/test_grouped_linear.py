"""Linears of experts: the references against loops over pairs, the kernels against the references, machine code."""

import pytest
import torch
from sidestream.ops.core.registry import Op
from sidestream.ops.moe.expert_linear import expert_linear, expert_linear_8bit
from sidestream.ops.moe.grouped_linear import expert_tile, grouped_linear, grouped_linear_8bit
from sidestream.ops.moe.grouped_linear_8bit_silu_mul import grouped_linear_8bit_silu_mul
from support.checks import Tolerance, assert_near, bits, poison
from support.moe_gemm_samples import Experts, experts_case, routing

F32, BF16, FP8, INT8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8
ROUTINGS = ("uniform", "skewed", "single")
# fp8 tensor cores keep 14 bits of a running sum; the interpreter's SiLU and sums differ in the last bits
NEAR = {
    INT8: Tolerance(1e-6, 1e-6),
    FP8: Tolerance(2e-3, 2e-3),
    BF16: Tolerance(2.0**-7, 2e-3),
    F32: Tolerance(1e-5, 1e-5),
}


# The references


def by_pair(case: Experts, dtype: torch.dtype = F32) -> torch.Tensor:
    """The linear of each pair, one after another, in fp64; zeros for pairs without expert."""
    flat = case.experts.reshape(-1).tolist()
    rows = []
    for pair, expert in enumerate(flat):
        row = pair // case.pairs_per_row
        if expert < 0:
            rows.append(torch.zeros(case.weight.shape[1], dtype=torch.float64))
            continue
        x, w = case.x[row].double(), case.weight[expert].double()
        if case.scale.numel():
            x, w = x * case.scale[row].double(), w * case.weight_scale[expert].double()[:, None]
        rows.append(w @ x)
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("from_pairs", [False, True])
@pytest.mark.parametrize("dtype", [INT8, FP8, F32])
def test_references_are_the_linear_of_each_pair(dtype: torch.dtype, from_pairs: bool, kind: str) -> None:
    case = experts_case(routing(13, 3, 7, kind, padding=2), 7, 24, 64, dtype, from_pairs)
    exact, form = by_pair(case), (case.experts, case.pairs_per_row)
    if dtype == F32:
        assert_near(expert_linear(case.x, case.weight, *form), exact)
        assert_near(grouped_linear(case.x, case.weight, *case.plan(16), case.pairs_per_row), exact)
        return
    assert_near(expert_linear_8bit(*case.given, *form, F32), exact)
    delta = torch.randn(39, 24)
    assert_near(grouped_linear_8bit(*case.given, None, *case.plan(16), case.pairs_per_row, F32), exact)
    lowered = grouped_linear_8bit(*case.given, delta, *case.plan(32), case.pairs_per_row, F32)
    assert_near(lowered[:33], (exact + delta)[:33])  # the last pairs have no expert
    gate, up = exact.chunk(2, dim=1)
    silu = grouped_linear_8bit_silu_mul(*case.given, *case.plan(16), case.pairs_per_row, F32)
    assert_near(silu, torch.nn.functional.silu(gate) * up)


def test_tiles_follow_the_pairs_of_an_expert() -> None:
    assert [expert_tile(pairs, 128) for pairs in (8, 2048, 2049, 4096, 4097, 8192, 8193, 1 << 17)] == [
        16, 16, 32, 32, 64, 64, 128, 128,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 32, dtype=INT8)}, r"x torch.int8\(5, 32\) and weight torch.int8\(4, 24, 64\)"),
        ({"weight": torch.zeros(4, 24, 64)}, r"of the same dtype"),
        ({"scale": torch.zeros(4)}, r"scale \(4,\) and weight_scale \(4, 24\)"),
        ({"weight_scale": torch.zeros(4, 24, 1)}, r"weight_scale \(4, 24, 1\)"),
        ({"pairs_per_row": 3}, r"order \(10,\).*pairs_per_row=3"),
        ({"tile": 24}, r"tile is 24.*\(16, 32, 64, 128\)"),
    ],
    ids=["columns", "dtypes", "scale", "weight_scale", "pairs_per_row", "tile"],
)
def test_misfits_are_named(change: dict[str, object], message: str) -> None:
    case = experts_case(routing(5, 2, 4), 4, 24, 64)
    order, tiles, tile = case.plan()
    given = {"x": case.x, "scale": case.scale, "weight": case.weight, "weight_scale": case.weight_scale, "delta": None}
    given |= {"order": order, "tiles": tiles, "tile": tile, "pairs_per_row": 2, "out_dtype": BF16} | change
    with pytest.raises(ValueError, match="grouped_linear_8bit: .*" + message):
        grouped_linear_8bit.launch(*given.values(), out=(grouped_linear_8bit.fake(*given.values()),))


# The kernels


def check(op: Op, case: Experts, tile: int | None, tolerance: Tolerance, *more: object, **options: int) -> None:
    """The op's kernel writes the rows of the reference, no other row, and the same bits twice.

    `more`: its last arguments, after those of the plan.
    """
    operands = case.given if case.scale.numel() else (case.x, case.weight)
    between = (None,) if op is grouped_linear_8bit else ()
    args = (*operands, *between, *case.plan(tile), case.pairs_per_row, *more)
    results = []
    for _ in range(2):
        out = poison(op.fake(*args))
        op.launch(*args, out=(out,), **options)
        results.append(out)
    assert torch.equal(bits(results[0]), bits(results[1])), "other bits at a second launch"
    with_expert = case.experts.reshape(-1) >= 0
    assert_near(results[0][with_expert], op.reference(*args)[with_expert], tolerance)
    untouched = results[0][~with_expert]
    assert torch.equal(bits(untouched), bits(poison(untouched.clone()))), "rows without an expert were written"


@pytest.mark.interpret
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("dtype", [INT8, FP8, BF16, F32])
def test_kernel(dtype: torch.dtype, kind: str) -> None:
    from_pairs = kind == "skewed"
    case = experts_case(routing(11, 3, 5, kind, padding=3), 5, 80, 208, dtype, from_pairs)
    if dtype in (BF16, F32):
        check(grouped_linear, case, None, NEAR[dtype])
    else:
        check(grouped_linear_8bit, case, None, NEAR[dtype], F32)
        check(grouped_linear_8bit_silu_mul, case, None, NEAR[FP8], F32)
