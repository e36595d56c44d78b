"""lora_expand_rounded: the specification against loops and lora_expand, the kernel against it, its machine code."""

from typing import Any

import pytest
import torch
from sidestream.ops.lora.expand import lora_expand
from sidestream.ops.lora.expand_rounded import lora_expand_rounded, lora_round
from sidestream.ops.lora.plan import lora_plan_fake, lora_tile
from sidestream.ops.lora.shrink import reference as lora_shrink_reference
from support.checks import Tolerance, assert_near, check_kernel, poison
from support.lora import LoraCase, lora_case
from support.samples import lora_expand_rounded_inputs
from support.sm90 import launched

BF16, INT8 = torch.bfloat16, torch.int8
# one step of bf16 where a product is on a rounding edge: the kernel's steps have 22 bits
NEAR = {0: Tolerance(2.0**-7, 1e-6, differing=0.02)}


def case(tokens: int, rank: int, slices: list[int], **more: Any) -> LoraCase:
    return lora_case(tokens, 128, rank, slices, splits=more.pop("splits", 2), **more)


def test_specification_against_loops() -> None:
    made = case(37, 16, [20, 12, 8], tile=16)
    ranks, rank_step, b, b_scale, *_ = args = lora_expand_rounded_inputs(made)
    exact = torch.zeros(37, 40, dtype=torch.float64)
    for token, slot in enumerate(made.adapter_index.tolist()):
        for column in range(40) if slot >= 0 else ():
            linear = (column >= 20) + (column >= 32)
            product = (ranks[token, linear * 16 : (linear + 1) * 16].double() * b[slot, column].double()).sum()
            exact[token, column] = product * rank_step[token, linear].double() * b_scale[slot, column].double()
    delta = lora_expand_rounded(*args)
    assert delta.dtype == BF16 and bool((delta[made.adapter_index < 0] == 0).all())
    assert_near(delta.double(), exact, Tolerance(2.0**-8, 1e-6))


@pytest.mark.parametrize("rank", [16, 32])
def test_specification_is_near_that_of_planes(rank: int) -> None:
    made = case(130, rank, [96, 32, 32]).quantized(False, INT8)
    planes = lora_shrink_reference(*made.shrink)
    got = lora_expand_rounded(
        *lora_round(planes, 3), made.b, made.b_scale, made.token_order, made.tiles, made.tile, made.slices
    )
    want = lora_expand(*made.expand(planes))
    assert 0 < (got.float() - want.float()).norm() < 0.01 * want.float().norm()


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("tokens", "rank", "slices", "more"),
    [
        (1, 32, [32], {"adapter_index": torch.tensor([2])}),
        (3, 8, [20], {}),
        (9, 16, [200], {}),  # two programs' columns, the second's not all there
        (17, 32, [256, 64, 64], {}),
        (33, 32, [129, 1, 40], {"slots": 8}),  # rows that are not aligned
        (130, 32, [144, 144], {}),  # tiles of 32
        (70, 24, [16, 16], {"tile": 64}),
        (200, 64, [40], {"slots": 1}),
        (20, 48, [48], {"adapter_index": torch.full((20,), -1)}),
    ],
)
def test_kernel(tokens: int, rank: int, slices: list[int], more: dict[str, Any]) -> None:
    check_kernel(
        lora_expand_rounded, *lora_expand_rounded_inputs(case(tokens, rank, slices, **dict(more))), tolerances=NEAR
    )


@pytest.mark.interpret
def test_tokens_without_adapter_ignore_their_ranks() -> None:
    made = case(20, 16, [48])
    ranks, rank_step, *rest = lora_expand_rounded_inputs(made)
    without = made.adapter_index < 0
    ranks, rank_step = ranks.clone(), rank_step.clone()
    ranks[without], rank_step[without] = -128, float("nan")
    (delta,) = check_kernel(lora_expand_rounded, ranks, rank_step, *rest, tolerances=NEAR)
    assert bool((delta[without] == 0).all())


@pytest.mark.parametrize("rank", [4, 12, 72, 128])
def test_names_ranks_that_it_does_not_take(rank: int) -> None:
    with pytest.raises(
        ValueError, match=rf"stacks of rank {rank}; supported are multiples of 8 up to 64; use lora_expand"
    ):
        lora_expand_rounded.launch(*lora_expand_rounded_inputs(case(4, rank, [32])), out=(torch.empty(4, 32),))


def test_names_what_does_not_fit() -> None:
    ranks, rank_step, b, b_scale, *plan, slices = lora_expand_rounded_inputs(case(4, 16, [48, 16]))
    with pytest.raises(ValueError, match=r"b torch.float8_e4m3fn\(4, 64, 16\)"):
        lora_expand_rounded.fake(ranks, rank_step, b.to(torch.float8_e4m3fn), b_scale, *plan, slices)
    with pytest.raises(ValueError, match=r"b_scale \(64,\)"):
        lora_expand_rounded(ranks, rank_step, b, b_scale[0], *plan, slices)
    for wrong in ([48], [16, 16, 16, 16], []):
        with pytest.raises(ValueError, match=r"one to three slices that add up to N"):
            lora_expand_rounded(ranks, rank_step, b, b_scale, *plan, wrong)
    with pytest.raises(
        ValueError,
        match=r"ranks torch.int8\(4, 16\).*needs torch.int8 \[T, 32\] and torch.float32 \[T, 2\], as lora_round "
        r"makes them",
    ):
        lora_expand_rounded(ranks[:, :16], rank_step, b, b_scale, *plan, slices)
    with pytest.raises(ValueError, match=r"rank_step torch.bfloat16"):
        lora_expand_rounded(ranks, rank_step.to(BF16), b, b_scale, *plan, slices)
    with pytest.raises(ValueError, match=r"pass ranks.contiguous"):
        lora_expand_rounded.launch(
            torch.empty(32, 4, dtype=INT8).T, rank_step, b, b_scale, *plan, slices, out=(torch.empty(4, 64),)
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("slices", "rank"), [([4096, 1024, 1024], 32), ([4096], 64), ([14336, 14336], 32), ([100, 36], 16)]
)
@pytest.mark.parametrize("tokens", [1, 8, 33, 128, 256, 300])
def test_on_gpu(tokens: int, slices: list[int], rank: int) -> None:
    check_kernel(
        lora_expand_rounded,
        *lora_expand_rounded_inputs(case(tokens, rank, slices, slots=8, device="cuda")),
        tolerances=NEAR,
    )


@pytest.mark.gpu
def test_launched_early_on_gpu() -> None:
    """It sees what the rounding before it wrote: new ranks each time, poisoned between."""
    for _ in range(4):
        made = case(64, 32, [4096], device="cuda")
        ranks, rank_step, *rest = lora_expand_rounded_inputs(made)
        planes = lora_shrink_reference(*made.shrink)
        late, late_step = poison(ranks.clone()), poison(rank_step.clone())
        delta = poison(torch.empty(64, 4096, dtype=BF16, device="cuda"))
        torch.cuda.synchronize()
        lora_round.launch(planes, 1, out=(late, late_step))
        lora_expand_rounded.launch(late, late_step, *rest, out=(delta,), pdl=True)
        assert_near(delta, lora_expand_rounded.reference(late, late_step, *rest), NEAR[0])


@pytest.mark.machine_code
@pytest.mark.parametrize(("tokens", "slices"), [(8, [14336, 14336]), (128, [4096, 1024, 1024]), (256, [4096])])
def test_machine_code(tokens: int, slices: list[int]) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tile, linears, n = lora_tile(tokens), len(slices), sum(slices)
    plan = lora_plan_fake(meta(tokens, dtype=torch.int32), 8, tile)
    args = (
        meta(tokens, linears * 32, dtype=INT8),
        meta(tokens, linears),
        meta(8, n, 32, dtype=INT8),
        meta(8, n),
        *plan,
        tile,
        slices,
    )
    (code,) = launched(lora_expand_rounded, *args, pdl=True)
    assert code.spills == 0 and code.registers <= 48 and code.shared_bytes == 0, "it leaves no room next to a base GEMM"
    assert code.sass["IMMA"] == 4 and code.sass["ATOMG"] + code.sass["RED"] == 0
    before, after = code.ptx_text.split("griddepcontrol.wait")
    assert before.count("ld.global.v2") == 4, "B's rows are not on their way before the wait"
    assert after.count("ld.global") == 4 and after.count("st.global.v4") == 2
