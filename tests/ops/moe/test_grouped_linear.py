"""Linears of experts: the references against loops over pairs, the kernels against the references, machine code."""

import itertools
from dataclasses import replace

import pytest
import torch
from sidestream.ops.core.registry import Op
from sidestream.ops.moe.expert_linear import expert_linear, expert_linear_8bit
from sidestream.ops.moe.grouped_linear import expert_tile, grouped_linear, grouped_linear_8bit
from sidestream.ops.moe.grouped_linear_8bit_silu_mul import grouped_linear_8bit_silu_mul
from sidestream.ops.moe.kernel_triton import TILES, default_config, launch_grouped
from support import linears
from support.checks import Tolerance, assert_near, bits, check_kernel, poison
from support.moe_gemm_samples import Experts, experts_case, routing
from support.sm90 import MachineCode, compile_launch

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
@pytest.mark.parametrize(
    ("dtype", "kind"), [(INT8, "uniform"), (INT8, "skewed"), (FP8, "single"), (BF16, "uniform"), (F32, "skewed")]
)
def test_kernel(dtype: torch.dtype, kind: str) -> None:
    from_pairs = kind == "skewed"
    case = experts_case(routing(11, 2, 3, kind, padding=3), 3, 80, 272, dtype, from_pairs)
    if dtype in (BF16, F32):
        check(grouped_linear, case, None, NEAR[dtype])
    else:
        check(grouped_linear_8bit, case, None, NEAR[dtype], F32)
        check(grouped_linear_8bit_silu_mul, case, None, NEAR[FP8], F32)


@pytest.mark.interpret
def test_every_token_count(request: pytest.FixtureRequest) -> None:
    counts = range(1, 301) if request.config.getoption("--exhaustive") else (1, 8, 17, 40)
    for tokens, kind in itertools.product(counts, ROUTINGS):
        case = experts_case(routing(tokens, 2, 3, kind, padding=tokens // 5), 3, 24, 32)
        check(grouped_linear_8bit, case, None, NEAR[INT8], F32)


@pytest.mark.interpret
@pytest.mark.parametrize("activate", [False, True])
@pytest.mark.parametrize("tile", TILES)
def test_tiles_and_few_programs(tile: int, activate: bool) -> None:
    """More tiles than a round has, two of one expert, several blocks of columns, and programs with several items."""
    count = 8 if tile >= 64 else 2
    experts = torch.cat([torch.arange(count), torch.ones(tile), torch.tensor([-1, 0, -1])])
    case = experts_case(experts.to(torch.int32).unsqueeze(1), count, 136, 16, FP8 if tile == 64 else INT8)
    if activate:
        check(grouped_linear_8bit_silu_mul, case, tile, NEAR[FP8], F32, sm_budget=1)
    else:
        check(grouped_linear_8bit, case, tile, NEAR[FP8], F32, sm_budget=1)


@pytest.mark.interpret
def test_delta_and_rounding() -> None:
    case = experts_case(routing(9, 2, 4), 4, 40, 64)
    args = (*case.given, torch.randn(18, 40).to(BF16), *case.plan(), case.pairs_per_row, BF16)
    check_kernel(grouped_linear_8bit, *args)


@pytest.mark.interpret
@pytest.mark.parametrize(("dtype", "tile"), [(INT8, 16), (FP8, 64), (BF16, 16)])
def test_a_pair_does_not_depend_on_its_neighbours(dtype: torch.dtype, tile: int) -> None:
    case = experts_case(routing(20, 2, 3, "skewed"), 3, 40, 96, dtype)

    def run(case: Experts) -> torch.Tensor:
        operands = case.given if case.scale.numel() else (case.x, case.weight)
        op, more = (grouped_linear_8bit, (BF16,)) if case.scale.numel() else (grouped_linear, ())
        between = (None,) if case.scale.numel() else ()
        args = (*operands, *between, *case.plan(tile), case.pairs_per_row, *more)
        op.launch(*args, out=(out := op.fake(*args),))
        return out

    whole = run(case)
    for token in (0, 19):
        only = slice(token, token + 1)
        alone = run(replace(case, x=case.x[only], scale=case.scale[only], experts=case.experts[only]))
        assert torch.equal(bits(alone), bits(whole[2 * token : 2 * token + 2]))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [INT8, F32])
def test_launches_of_graphs_that_are_not_lowered(dtype: torch.dtype) -> None:
    case = experts_case(routing(9, 2, 4), 4, 40, 64, dtype)
    if dtype == F32:
        check_kernel(expert_linear, case.x, case.weight, case.experts, 2)
    else:
        check_kernel(expert_linear_8bit, *case.given, case.experts, 2, F32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 8, 64, 300, 8192])
@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_qwen3_30b_a3b_on_the_gpu(dtype: torch.dtype, tokens: int, kind: str) -> None:
    experts = routing(tokens, 8, 128, kind, padding=tokens // 4)
    case = experts_case(experts, 128, 1536, 2048, dtype, device="cuda")
    near = linears.NEAR if dtype == FP8 else NEAR[INT8]
    check(grouped_linear_8bit, case, None, near, BF16)
    check(grouped_linear_8bit_silu_mul, case, None, Tolerance(linears.NEAR.rtol, 4 * linears.NEAR.atol), BF16, pdl=True)
    check(grouped_linear_8bit, experts_case(experts, 128, 2048, 768, dtype, True, "cuda"), None, near, BF16)


# Machine code


def compiled(
    tile: int, n: int, k: int, experts: int, top_k: int, dtype: torch.dtype, activate: bool = False
) -> MachineCode:
    """The kernel of the default configuration, launched as in a lowered graph."""

    def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    pairs = 8 * tile
    by_row = 1 if top_k == 1 else top_k
    scales = (meta(pairs // by_row), meta(experts, n)) if dtype in (INT8, FP8) else (None, None)
    (code,) = compile_launch(
        launch_grouped,
        meta(pairs // by_row, k, dtype=dtype),
        scales[0],
        meta(experts, n, k, dtype=dtype),
        scales[1],
        None,
        meta(pairs, dtype=torch.int32),
        meta(9 + experts, 3, dtype=torch.int32),
        by_row,
        meta(pairs, n // 2 if activate else n, dtype=BF16),
        default_config(tile, dtype),
        activate=activate,
        pdl=True,
    )
    return code


QWEN3_30B_A3B = {"gate_up": (1536, 2048, 128, 8), "down": (2048, 768, 128, 1)}
MIXTRAL = {"gate_up": (28672, 4096, 8, 2), "down": (4096, 14336, 8, 1)}


@pytest.mark.machine_code(each="tile")
@pytest.mark.parametrize("dtype", [INT8, FP8, BF16])
@pytest.mark.parametrize("activate", [True, False])
@pytest.mark.parametrize("shape", [*QWEN3_30B_A3B.values(), *MIXTRAL.values()], ids=str)
@pytest.mark.parametrize("tile", [16, 128, 32, 64])
def test_default_configurations_use_wgmma_without_spills(
    tile: int, shape: tuple[int, int, int, int], activate: bool, dtype: torch.dtype
) -> None:
    if activate and (dtype == BF16 or shape[3] == 1):
        pytest.skip("gate and up are one eight-bit linear")
    code, config = compiled(tile, *shape, dtype, activate), default_config(tile, dtype)
    assert code.spills == 0
    assert code.sass[{INT8: "IGMMA", FP8: "QGMMA", BF16: "HGMMA"}[dtype]] > 0
    assert code.sass["LDGSTS"] > 0, "the loads are not pipelined"
    assert code.sass["SHFL"] == 0, "gate and up of a column are in different threads"
    assert code.ptx_count("griddepcontrol.wait") == 1
    # the programs of an SM are resident together
    assert config.ctas_per_sm * code.registers * 32 * config.warps <= 65536
    assert config.ctas_per_sm * (code.shared_bytes + 1024) <= 228 * 1024
