"""LoRA on experts: the semantic op against loops over pairs, and its kernels, where pairs share rows of x."""

from dataclasses import replace

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.elementwise.quantize import reference as quantize_rowwise_reference
from sidestream.ops.lora.expand import lora_expand
from sidestream.ops.lora.plan import lora_splits
from sidestream.ops.lora.shrink import lora_shrink
from sidestream.ops.moe.expert_lora import expert_lora, pair_tile
from sidestream.ops.moe.plan import expert_groups, group_plan
from support.checks import Tolerance, assert_near, bits, check_kernel, poison
from support.lora import LoraCase
from support.moe_gemm_samples import routing
from support.sm90 import launched

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
SHRINK, EXPAND = {0: Tolerance(1e-4, 1e-4)}, {0: Tolerance(2.0**-6, 0.05)}


def pairs_case(
    tokens: int, top_k: int, by_pair: bool = False, tile: int = 1, dtype: torch.dtype = BF16, k: int = 96, n: int = 24
) -> tuple[LoraCase, torch.Tensor, torch.Tensor, int]:
    """A case of gate and up of rank 16 whose "slots" are groups, 3 adapters with 4 experts each; the adapters of the
    tokens and their experts; and pairs_per_row.
    """
    adapters = torch.randint(0, 3, (tokens,)).where(torch.rand(tokens) > 0.2, -1).to(torch.int32)
    experts = routing(tokens, top_k, 4, padding=tokens // 5)
    order, tiles = group_plan(expert_groups(adapters, experts, 4), 12, tile)
    rows = tokens * top_k if by_pair else tokens
    case = LoraCase(
        x=torch.randn(rows, k).to(dtype),
        a=(torch.randn(12, 32, k) / k**0.5).to(dtype),
        b=(torch.randn(12, n, 16) / 4).to(dtype),
        adapter_index=adapters,
        token_order=order,
        tiles=tiles,
        tile=tile,
        splits=lora_splits(k, tokens * top_k),
        slices=[n - 8, 8],
    )
    return case, adapters, experts, 1 if by_pair else top_k


def semantic(case: LoraCase, adapters: torch.Tensor, experts: torch.Tensor, pairs_per_row: int) -> tuple[object, ...]:
    """Arguments of `expert_lora`."""
    a, b, a_scale, b_scale = (
        None if stack is None else stack.unflatten(0, (3, 4)) for stack in (case.a, case.b, case.a_scale, case.b_scale)
    )
    return case.x, a, b, adapters, experts, case.slices, pairs_per_row, a_scale, b_scale, case.x_scale


def with_experts(adapters: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Pairs that have an adapter and an expert."""
    return ((adapters >= 0).unsqueeze(1) & (experts >= 0)).reshape(-1)


@pytest.mark.parametrize("by_pair", [False, True])
def test_reference_against_loops(by_pair: bool) -> None:
    case, adapters, experts, pairs_per_row = pairs_case(11, 2, by_pair, dtype=F32)
    delta = expert_lora(*semantic(case, adapters, experts, pairs_per_row))
    exact = torch.zeros(22, 24, dtype=torch.float64)
    for pair, expert in enumerate(experts.reshape(-1).tolist()):
        adapter = int(adapters[pair // 2])
        if adapter >= 0 and expert >= 0:
            a, b = case.a[adapter * 4 + expert].double(), case.b[adapter * 4 + expert].double()
            shrunk = a @ case.x[pair // pairs_per_row].double()
            exact[pair] = torch.cat([b[:16] @ shrunk[:16], b[16:] @ shrunk[16:]])
    assert_near(delta.double(), exact, Tolerance(1e-5, 1e-5))
    assert exact.any()


@pytest.mark.parametrize("tile", [1, 8, 16])
@pytest.mark.parametrize("by_pair", [False, True])
def test_plan_shrink_expand_is_expert_lora(by_pair: bool, tile: int) -> None:
    case, adapters, experts, pairs_per_row = pairs_case(13, 2, by_pair, tile, F32)
    planes = lora_shrink(*case.shrink, pairs_per_row)
    assert planes.shape == (case.splits, 26, 32)
    delta = lora_expand(*case.expand(planes))
    assert_near(delta, expert_lora(*semantic(case, adapters, experts, pairs_per_row)), Tolerance(1e-5, 1e-5))


def test_few_pairs_have_tiles_of_their_own() -> None:
    assert [pair_tile(pairs, 1024) for pairs in (8, 1024, 2048, 4096, 4097, 1 << 15, 1 << 17)] == [
        1,
        1,
        8,
        8,
        16,
        32,
        64,
    ]
    assert [pair_tile(pairs, 128) for pairs in (8, 128, 129, 512, 513, 1 << 13)] == [1, 1, 8, 8, 16, 64]


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("tile", "by_pair", "k", "stored"),
    [
        (1, False, 96, None),
        (1, True, 640, INT8),
        (8, False, 640, INT8),
        (16, False, 640, INT8),
        (64, False, 160, INT8),
        (32, True, 96, None),
    ],
)
def test_kernels(tile: int, by_pair: bool, k: int, stored: torch.dtype | None) -> None:
    case, adapters, experts, pairs_per_row = pairs_case(9, 2, by_pair, tile, k=k)
    if stored is not None:
        case = case.quantized(True, stored)
    case = replace(case, splits=1 if tile == 64 else 2)
    (planes,) = check_kernel(OPS["lora_shrink"], *case.shrink, pairs_per_row, tolerances=SHRINK)
    assert (planes[:, ~with_experts(adapters, experts)] == 0).all()
    check_kernel(OPS["lora_expand"], *case.expand(planes), tolerances=EXPAND)


@pytest.mark.interpret
@pytest.mark.parametrize("by_pair", [False, True])
def test_launch_of_graphs_that_are_not_lowered(by_pair: bool) -> None:
    case, adapters, experts, pairs_per_row = pairs_case(9, 2, by_pair)
    case = case.quantized(True, INT8)
    args = semantic(case, adapters, experts, pairs_per_row)
    out = poison(expert_lora.fake(*args))
    expert_lora.launch(*args, out=(out,))
    wanted = with_experts(adapters, experts)
    assert_near(out[wanted], expert_lora.reference(*args)[wanted], EXPAND[0])


@pytest.mark.interpret
def test_a_pair_does_not_depend_on_its_neighbours() -> None:
    case, adapters, experts, _ = pairs_case(8, 2)
    adapters, experts = adapters.clamp(min=0), experts.clamp(min=0)

    def run(tokens: slice) -> torch.Tensor:
        x, scale = quantize_rowwise_reference(case.x, INT8)
        some = replace(case.quantized(False, INT8), x=x[tokens], x_scale=scale[tokens])
        args = semantic(some, adapters[tokens], experts[tokens], 2)
        expert_lora.launch(*args, out=(out := expert_lora.fake(*args),))
        return out

    assert torch.equal(bits(run(slice(0, 8))[6:8]), bits(run(slice(3, 4))))


@pytest.mark.machine_code(each="tokens")
@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize("tokens", [8, 256, 512])
def test_qwen3_30b_a3b_without_spills(tokens: int, pdl: bool) -> None:
    """Gate and up of rank 16 in eight bits, with 8 adapters of 128 experts."""

    def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    pairs, groups = 8 * tokens, 8 * 128
    tile, splits = pair_tile(pairs, groups), lora_splits(2048, pairs)
    plan = (*group_plan.fake(meta(pairs, dtype=torch.int32), groups, tile), tile)
    stacks = meta(groups, 32, 2048, dtype=INT8), meta(groups, 1536, 16, dtype=INT8)
    x, scales = meta(tokens, 2048, dtype=INT8), (meta(groups, 32), meta(tokens))
    (shrink,) = launched(OPS["lora_shrink"], x, stacks[0], *plan, splits, *scales, 8, pdl=pdl)
    planes = meta(splits, pairs, 32)
    (expand,) = launched(OPS["lora_expand"], planes, stacks[1], *plan, [768, 768], meta(groups, 1536), pdl=pdl)
    assert shrink.spills == expand.spills == 0
    assert shrink.sass["IMMA"] + shrink.sass["IGMMA"] > 0
