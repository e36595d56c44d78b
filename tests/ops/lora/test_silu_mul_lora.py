"""silu_mul_lora: the specification against loops and separate launches, the kernel against it, its machine code."""

from typing import Any

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.elementwise.silu_mul import silu_mul
from sidestream.ops.lora import silu_mul_lora as module
from sidestream.ops.lora.expand import lora_expand
from sidestream.ops.lora.expand_rounded import lora_round
from sidestream.ops.lora.plan import lora_plan_fake, lora_tile
from sidestream.ops.lora.shrink import reference as lora_shrink_reference
from sidestream.ops.lora.silu_mul_lora import block, silu_mul_lora
from support.checks import Tolerance, assert_near, check_kernel, poison
from support.lora import LoraCase, lora_case
from support.samples import silu_mul_lora_inputs
from support.sm90 import MachineCode, launched

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
NEAR = {F32: Tolerance(1e-5, 1e-5), BF16: Tolerance(2.0**-7, 1e-5, differing=0.01)}


def case(tokens: int, width: int, rank: int, **more: Any) -> LoraCase:
    return lora_case(tokens, 128, rank, [width, width], splits=more.pop("splits", 2), **more)


def inputs(*args: Any, dtype: torch.dtype = BF16, **more: Any) -> tuple[Any, ...]:
    return silu_mul_lora_inputs(case(*args, **more), dtype)


def test_specification_against_loops() -> None:
    made = case(37, 24, 16, tile=16)
    gate_up, ranks, rank_step, b, b_scale, *_ = args = silu_mul_lora_inputs(made, F32)
    exact = gate_up.double()
    for token, slot in enumerate(made.adapter_index.tolist()):
        for column in range(48) if slot >= 0 else ():
            half = column // 24
            product = (ranks[token, half * 16 : (half + 1) * 16].double() * b[slot, column].double()).sum()
            exact[token, column] += product * rank_step[token, half].double() * b_scale[slot, column].double()
    gate, up = exact.chunk(2, dim=1)
    assert_near(silu_mul_lora(*args).double(), gate * torch.sigmoid(gate) * up, Tolerance(1e-5, 1e-5))


@pytest.mark.parametrize("rank", [16, 32])
def test_specification_is_near_separate_launches(rank: int) -> None:
    made = case(130, 96, rank).quantized(False, INT8)
    planes = lora_shrink_reference(*made.shrink)
    gate_up = torch.randn(130, 192).to(BF16)
    got = silu_mul_lora(gate_up, *lora_round(planes, 2), made.b, made.b_scale, made.token_order, made.tiles, made.tile)
    want, plain = silu_mul(gate_up, lora_expand(*made.expand(planes))), silu_mul(gate_up, None)
    assert got.dtype == BF16 and got[made.adapter_index < 0].equal(plain[made.adapter_index < 0])
    assert (
        (got.float() - want.float()).norm()
        < 0.01 * want.float().norm()
        < 0.01 * 3 * (plain.float() - want.float()).norm()
    )
    assert_near(got, want, Tolerance(2.0**-6, 0.15))


def test_a_token_does_not_see_its_neighbours() -> None:
    gate_up, ranks, rank_step, *rest = inputs(20, 24, 16, adapter_index=torch.full((20,), 2))
    one = case(1, 24, 16, adapter_index=torch.tensor([2]))
    alone = silu_mul_lora(gate_up[7:8], ranks[7:8], rank_step[7:8], *rest[:2], one.token_order, one.tiles, one.tile)
    assert_near(silu_mul_lora(gate_up, ranks, rank_step, *rest)[7:8], alone)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("tokens", "width", "rank", "more"),
    [
        (1, 32, 32, {"adapter_index": torch.tensor([2])}),
        (3, 20, 8, {}),
        (9, 200, 16, {}),  # two programs' columns, the second's not all there
        (65, 300, 32, {"slots": 8}),
        (130, 129, 32, {}),  # tiles of 32, rows that are not aligned
        (200, 40, 64, {}),
        (40, 33, 48, {"tile": 32}),
        (70, 16, 24, {"tile": 64}),  # programs of 16 and of 32 tokens for tiles of 64
        (150, 140, 32, {"tile": 64, "slots": 1}),
        (20, 48, 32, {"adapter_index": torch.full((20,), -1)}),
        (33, 48, 32, {"tile": 32, "adapter_index": torch.arange(33) // 17}),  # one token in a tile's second part
    ],
)
def test_kernel(
    tokens: int, width: int, rank: int, more: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if dtype == F32 and request.node.callspec.indices["tokens"] % 2 and not request.config.getoption("--exhaustive"):
        pytest.skip("every other size in fp32; run with --exhaustive")
    check_kernel(silu_mul_lora, *inputs(tokens, width, rank, dtype=dtype, **dict(more)), tolerances={0: NEAR[dtype]})


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("warps", "steps", "parts"), [(1, 1, 1), (1, 3, 2), (2, 2, 1), (2, 2, 3), (4, 1, 4), (8, 1, 2)]
)
def test_kernel_with_other_blocks(monkeypatch: pytest.MonkeyPatch, warps: int, steps: int, parts: int) -> None:
    monkeypatch.setattr(module, "BLOCKS", ((1 << 30, warps, steps, parts),))
    assert block(70, 64, 300) == (warps, steps, parts)
    check_kernel(silu_mul_lora, *inputs(70, 300, 40, tile=64, slots=2), tolerances={0: NEAR[BF16]})


def test_blocks_are_no_larger_than_the_problem() -> None:
    assert block(64, 16, 14336) == block(128, 16, 14336) == (4, 1, 1) and block(256, 32, 14336) == block(
        300, 64, 14336
    ) == (4, 1, 2)
    assert block(256, 16, 14336) == (4, 1, 1) and block(256, 32, 33) == (2, 1, 2) and block(1, 16, 7) == (1, 1, 1)


@pytest.mark.interpret
def test_tokens_without_adapter_ignore_their_ranks() -> None:
    made = case(20, 48, 16)
    gate_up, ranks, rank_step, *rest = silu_mul_lora_inputs(made)
    without = made.adapter_index < 0
    ranks, rank_step = ranks.clone(), rank_step.clone()
    ranks[without], rank_step[without] = -128, float("nan")
    (h,) = check_kernel(silu_mul_lora, gate_up, ranks, rank_step, *rest, tolerances={0: NEAR[BF16]})
    assert_near(h[without], silu_mul(gate_up, None)[without], NEAR[BF16])


@pytest.mark.interpret
def test_a_token_with_nothing_to_round_keeps_its_gate() -> None:
    gate_up, ranks, rank_step, *rest = inputs(5, 32, 16, adapter_index=torch.zeros(5))
    (h,) = check_kernel(silu_mul_lora, gate_up, torch.zeros_like(ranks), rank_step, *rest)
    assert_near(h, silu_mul(gate_up, None), NEAR[BF16])


@pytest.mark.parametrize("rank", [4, 12, 72, 128])
def test_names_ranks_that_it_does_not_take(rank: int) -> None:
    args = inputs(4, 32, rank)
    with pytest.raises(ValueError, match=rf"stacks of rank {rank}; supported are multiples of 8 up to 64"):
        silu_mul_lora.launch(*args, out=(torch.empty(4, 32),))


def test_names_what_does_not_fit() -> None:
    gate_up, ranks, rank_step, b, b_scale, *plan = inputs(4, 32, 16)
    with pytest.raises(ValueError, match=r"gate_up \(4, 62\) and b torch.int8\(4, 64, 16\)"):
        silu_mul_lora(gate_up[:, :62], ranks, rank_step, b, b_scale, *plan)
    with pytest.raises(ValueError, match=r"b torch.float8_e4m3fn"):
        silu_mul_lora.fake(gate_up, ranks, rank_step, b.to(torch.float8_e4m3fn), b_scale, *plan)
    with pytest.raises(
        ValueError,
        match=r"ranks torch.int8\(4, 16\).*needs torch.int8 \[4, 32\] and torch.float32 \[4, 2\], as lora_round "
        r"makes them",
    ):
        silu_mul_lora(gate_up, ranks[:, :16], rank_step, b, b_scale, *plan)
    with pytest.raises(ValueError, match=r"ranks torch.float32"):
        silu_mul_lora(gate_up, ranks.float(), rank_step, b, b_scale, *plan)
    for wrong in (rank_step[:, :1], rank_step.to(BF16)):
        with pytest.raises(ValueError, match=rf"rank_step {wrong.dtype}\({wrong.shape[0]}, {wrong.shape[1]}\)"):
            silu_mul_lora(gate_up, ranks, wrong, b, b_scale, *plan)
    with pytest.raises(ValueError, match=r"b_scale \(64,\); for b \(4, 64, 16\) it must be \(4, 64\)"):
        silu_mul_lora(gate_up, ranks, rank_step, b, b_scale[0], *plan)
    with pytest.raises(ValueError, match=r"pass gate_up.contiguous"):
        silu_mul_lora.launch(torch.empty(64, 4).T, ranks, rank_step, b, b_scale, *plan, out=(torch.empty(4, 32),))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 65, 128, 130, 200, 256, 300])
@pytest.mark.parametrize(
    ("width", "rank"), [(14336, 32), (14336, 16), (14336, 64), (14336, 8), (704, 48), (8200, 32), (333, 32), (7, 16)]
)
def test_kernel_on_the_gpu(tokens: int, width: int, rank: int) -> None:
    args = inputs(tokens, width, rank, slots=8, device="cuda")
    check_kernel(silu_mul_lora, *args, tolerances={0: NEAR[BF16]}, pdl=tokens % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 32, 64])
def test_fp32_on_the_gpu(rank: int) -> None:
    check_kernel(silu_mul_lora, *inputs(200, 1000, rank, dtype=F32, slots=8, device="cuda"), tolerances={0: NEAR[F32]})


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", [(1, 1, 1), (2, 2, 3), (4, 2, 1), (4, 2, 2), (4, 1, 4), (8, 1, 2)])
def test_other_blocks_on_the_gpu(monkeypatch: pytest.MonkeyPatch, chosen: tuple[int, int, int]) -> None:
    monkeypatch.setattr(module, "BLOCKS", ((1 << 30, *chosen),))
    check_kernel(silu_mul_lora, *inputs(200, 3000, 32, tile=64, slots=8, device="cuda"), tolerances={0: NEAR[BF16]})


@pytest.mark.gpu
def test_after_shrink_and_round_with_pdl() -> None:
    """Launched early, it still sees what the launches before it wrote: new inputs each time, planes and ranks
    poisoned between.
    """
    for tokens in (128, 200) * 10:
        made = lora_case(tokens, 4096, 32, [14336, 14336], slots=8, device="cuda")
        gate_up, ranks, rank_step, *rest = silu_mul_lora_inputs(made)
        planes, h = (
            poison(torch.empty(made.splits, tokens, 64, device="cuda")),
            poison(gate_up.new_empty(tokens, 14336)),
        )
        ranks, rank_step = poison(torch.empty_like(ranks)), poison(torch.empty_like(rank_step))
        torch.cuda.synchronize()
        OPS["lora_shrink"].launch(*made.shrink, out=(planes,))
        lora_round.launch(planes, 2, out=(ranks, rank_step), pdl=True)
        silu_mul_lora.launch(gate_up, ranks, rank_step, *rest, out=(h,), pdl=True)
        assert_near(h, silu_mul_lora.reference(gate_up, ranks, rank_step, *rest), NEAR[BF16])
        q, step = lora_round.reference(planes, 2)
        assert_near(ranks, q, name="ranks")
        assert_near(rank_step, step, name="steps")


def machine_code(tokens: int, rank: int = 32, width: int = 14336) -> MachineCode:
    def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tile = lora_tile(tokens)
    plan = lora_plan_fake(meta(tokens, dtype=torch.int32), 8, tile)
    (code,) = launched(
        silu_mul_lora,
        meta(tokens, 2 * width, dtype=BF16),
        meta(tokens, 2 * rank, dtype=INT8),
        meta(tokens, 2),
        meta(8, 2 * width, rank, dtype=INT8),
        meta(8, 2 * width),
        *plan,
        tile,
        pdl=True,
    )
    return code


@pytest.mark.machine_code
@pytest.mark.parametrize("tokens", [65, 128, 256])
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_machine_code(tokens: int, rank: int) -> None:
    code, parts = machine_code(tokens, rank), 2 if tokens == 256 else 1
    most = {(1, False): 96, (2, False): 128, (1, True): 128, (2, True): 168}[parts, rank > 32]
    assert code.spills == 0 and code.registers <= most, "five, four or three programs of 4 warps don't fit on an SM"
    assert code.shared_bytes == code.sass["STS"] == code.sass["SHFL"] == code.sass["BAR"] == 0, "operands change hands"
    assert code.sass["IMMA"] > 0 and code.sass["I2F"] + code.sass["I2FP"] <= 4, (
        "the ranks' products are converted one by one"
    )
    early, late = code.ptx_text.split("griddepcontrol.wait")
    assert ".v2.b32" in early and ".s8.s8" not in early, "B's rows are not loaded before the wait"
    assert code.ptx_text.index("griddepcontrol.launch_dependents") < len(early)
    assert late.count("ld.global.v4.b32") == 4 * parts and late.count("st.global.v4.b32") == 2 * parts, (
        "gate, up and h are not moved by 16 bytes"
    )
    first = code.sass_text.partition("ACQBULK")[2].partition("IMMA")[0]
    assert first.count("LDG") >= 10 + 2 * (rank > 32), "loads are put off until the product is done"
