"""silu_mul_lora: the specification against loops and separate launches, the kernel against it, its machine code."""
from typing import Any

import pytest
import torch
from sidestream.ops.lora_expand import lora_expand
from sidestream.ops.lora_plan import lora_plan_fake, lora_splits, lora_tile
from sidestream.ops.quantize import quantize_rowwise
from sidestream.ops.registry import OPS
from sidestream.ops.silu_mul import silu_mul
from sidestream.ops.silu_mul_lora import silu_mul_lora
from sidestream.ops.triton_support import INTERPRETED
from support.checks import Tolerance, assert_near, check_kernel, poison
from support.lora import LoraCase, lora_case
from support.samples import silu_mul_lora_inputs
from support.sm90 import MachineCode, launched

BF16, INT8 = torch.bfloat16, torch.int8
# on a GPU a sum of planes on a rounding edge may land one step of int8 away: that much of a delta of order 1, in all columns of one token
NEAR = Tolerance(2.0**-7, 1e-5, differing=0.01) if INTERPRETED else Tolerance(2.0**-6, 0.15, differing=0.05)


def case(tokens: int, width: int, rank: int, **more: Any) -> LoraCase:
    return lora_case(tokens, 128, rank, [width, width], splits=more.pop("splits", 2), **more)


def inputs(*args: Any, **more: Any) -> tuple[Any, ...]:
    return silu_mul_lora_inputs(case(*args, **more))


def test_specification_against_loops() -> None:
    made = case(37, 24, 16, tile=16)
    gate_up, planes, b, b_scale, *_ = args = silu_mul_lora_inputs(made, torch.float32)
    planes[:, 5, :16] = 0.0  # nothing to round
    exact = gate_up.double()
    for token, slot in enumerate(made.adapter_index.tolist()):
        for column in range(48) if slot >= 0 else ():
            half = slice(column // 24 * 16, column // 24 * 16 + 16)
            q, step = quantize_rowwise(planes.sum(0)[token, half], INT8)
            exact[token, column] += (q.double() * b[slot, column].double()).sum() * step.double() * b_scale[slot, column].double()
    gate, up = exact.chunk(2, dim=1)
    assert_near(silu_mul_lora(*args).double(), gate * torch.sigmoid(gate) * up, Tolerance(1e-5, 1e-5))


@pytest.mark.parametrize("rank", [16, 32])
def test_specification_is_near_separate_launches(rank: int) -> None:
    made = case(130, 96, rank)
    gate_up, planes, b, b_scale, *plan = args = silu_mul_lora_inputs(made)
    got, want = silu_mul_lora(*args), silu_mul(gate_up, lora_expand(planes, b, *plan, made.slices, b_scale))
    plain = silu_mul(gate_up, None)
    assert got.dtype == BF16 and got[made.adapter_index < 0].equal(plain[made.adapter_index < 0])
    assert (got.float() - want.float()).norm() < 0.01 * want.float().norm() < 0.01 * 3 * (plain.float() - want.float()).norm()
    assert_near(got, want, Tolerance(2.0**-6, 0.15))


def test_a_token_does_not_see_its_neighbours() -> None:
    made = case(20, 24, 16, adapter_index=torch.full((20,), 2))
    gate_up, planes, *rest = silu_mul_lora_inputs(made)
    one = case(1, 24, 16, adapter_index=torch.tensor([2]))
    alone = silu_mul_lora(gate_up[7:8], planes[:, 7:8], *rest[:2], one.token_order, one.tiles, one.tile)
    assert_near(silu_mul_lora(gate_up, planes, *rest)[7:8], alone)


@pytest.mark.interpret
@pytest.mark.parametrize(("tokens", "width", "rank", "more"), [
    (1, 32, 32, {"adapter_index": torch.tensor([2])}),
    (3, 20, 8, {"splits": 3}),  # two programs' columns, the second's not all there
    (9, 200, 16, {}),
    (65, 300, 32, {"splits": 1, "slots": 8}),
    (130, 129, 32, {"splits": 4}),  # tiles of 32, rows that are not aligned
    (200, 40, 64, {}),
    (40, 33, 48, {"tile": 32}),
    (70, 16, 24, {"tile": 64}),
    (20, 48, 32, {"adapter_index": torch.full((20,), -1)}),
])
def test_kernel(tokens: int, width: int, rank: int, more: dict[str, Any]) -> None:
    check_kernel(silu_mul_lora, *inputs(tokens, width, rank, **dict(more)), tolerances={0: NEAR})


@pytest.mark.interpret
def test_tokens_without_adapter_ignore_their_planes() -> None:
    made = case(20, 48, 16)
    gate_up, planes, *rest = silu_mul_lora_inputs(made)
    planes = planes.clone()
    planes[:, made.adapter_index < 0] = float("nan")
    (h,) = check_kernel(silu_mul_lora, gate_up, planes, *rest, tolerances={0: NEAR})
    plain = silu_mul(gate_up, None)
    assert_near(h[made.adapter_index < 0], plain[made.adapter_index < 0], Tolerance(2.0**-7, 1e-6, differing=0.01))


@pytest.mark.interpret
def test_a_token_with_nothing_to_round_keeps_its_gate() -> None:
    gate_up, planes, *rest = inputs(5, 32, 16, adapter_index=torch.zeros(5))
    (h,) = check_kernel(silu_mul_lora, gate_up, torch.zeros_like(planes), *rest)
    assert_near(h, silu_mul(gate_up, None), Tolerance(2.0**-7, 1e-6, differing=0.01))


@pytest.mark.parametrize("rank", [4, 12, 72, 128])
def test_names_ranks_that_it_does_not_take(rank: int) -> None:
    args = inputs(4, 32, rank)
    with pytest.raises(ValueError, match=rf"stacks of rank {rank}; it takes multiples of 8 up to 64"):
        silu_mul_lora.launch(*args, out=(torch.empty(4, 32),))


def test_names_what_does_not_fit() -> None:
    gate_up, planes, b, b_scale, *plan = inputs(4, 32, 16)
    with pytest.raises(ValueError, match=r"gate_up \(4, 62\) and b torch.int8\(4, 64, 16\)"):
        silu_mul_lora(gate_up[:, :62], planes, b, b_scale, *plan)
    with pytest.raises(ValueError, match=r"b torch.float8_e4m3fn"):
        silu_mul_lora.fake(gate_up, planes, b.to(torch.float8_e4m3fn), b_scale, *plan)
    with pytest.raises(ValueError, match=r"planes \(2, 4, 16\).*must be \[splits, 4, 32\] and \(4, 64\)"):
        silu_mul_lora(gate_up, planes[..., :16], b, b_scale, *plan)
    with pytest.raises(ValueError, match=r"b_scale \(64,\)"):
        silu_mul_lora(gate_up, planes, b, b_scale[0], *plan)
    with pytest.raises(ValueError, match=r"pass gate_up.contiguous"):
        silu_mul_lora.launch(torch.empty(64, 4).T, planes, b, b_scale, *plan, out=(torch.empty(4, 32),))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 65, 128, 130, 200, 256, 300])
@pytest.mark.parametrize(("width", "rank"), [(14336, 32), (14336, 16), (14336, 64), (14336, 8), (704, 48), (8200, 32), (333, 32), (7, 16)])
def test_kernel_on_the_gpu(tokens: int, width: int, rank: int) -> None:
    args = inputs(tokens, width, rank, slots=8, splits=4, device="cuda")
    check_kernel(silu_mul_lora, *args, tolerances={0: NEAR}, pdl=tokens % 2 == 0)


@pytest.mark.gpu
def test_behind_shrink_with_pdl() -> None:
    """Launched early, it still sees what the shrink before it wrote: new inputs each time, planes poisoned between."""
    for tokens in (128, 200) * 10:
        made = lora_case(tokens, 4096, 32, [14336, 14336], slots=8, device="cuda")
        gate_up, planes, *rest = silu_mul_lora_inputs(made)
        planes, h = poison(torch.empty_like(planes)), poison(gate_up.new_empty(tokens, 14336))
        torch.cuda.synchronize()
        OPS["lora_shrink"].launch(*made.shrink, out=(planes,))
        silu_mul_lora.launch(gate_up, planes, *rest, out=(h,), pdl=True)
        assert_near(h, silu_mul_lora.reference(gate_up, planes, *rest), NEAR)


def machine_code(tokens: int, rank: int = 32, width: int = 14336) -> MachineCode:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tile = lora_tile(tokens)
    plan = lora_plan_fake(meta(tokens, dtype=torch.int32), 8, tile)
    (code,) = launched(silu_mul_lora, meta(tokens, 2 * width, dtype=BF16), meta(lora_splits(4096, tokens), tokens, 2 * rank),
                       meta(8, 2 * width, rank, dtype=INT8), meta(8, 2 * width), *plan, tile, pdl=True)  # fmt: skip
    return code


@pytest.mark.parametrize("tokens", [65, 128, 256])
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_machine_code(tokens: int, rank: int) -> None:
    code = machine_code(tokens, rank)
    assert code.spills == 0 and code.registers <= (96 if rank <= 32 else 128), "five programs of 4 warps don't fit on an SM"
    assert code.sass["IMMA"] > 0 and code.sass["I2F"] + code.sass["I2FP"] <= 4, "the ranks' products are converted one by one"
    early, late = code.ptx_text.split("griddepcontrol.wait")
    assert ".v2.b32" in early and ".s8.s8" not in early, "B's rows are not loaded before the wait"
    assert code.ptx_text.index("griddepcontrol.launch_dependents") < len(early)
    assert late.count("ld.global.v4.b32") >= 8 and late.count("st.global.v4.b32") >= 4, "gate, up and h are not moved by 16 bytes"
    assert code.sass["STS"] <= 8 and code.sass["BAR"] <= 8, "more than the shrunk rows goes through shared memory"
