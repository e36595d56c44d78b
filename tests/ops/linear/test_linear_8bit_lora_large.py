"""linear_8bit_lora: the reference against the ops that it replaces, the kernel in threads, compiled, and on a GPU."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sidestream.ops.linear import kernel_large, kernel_lora_large
from sidestream.ops.linear import linear_8bit_lora as module
from sidestream.ops.linear.kernel_selection import LinearConfig, large_candidates, tuned_table
from sidestream.ops.linear.linear_8bit import linear_8bit
from sidestream.ops.linear.linear_8bit_lora import candidates, fits, launch, linear_8bit_lora, lora_config
from sidestream.ops.lora.expand import lora_expand
from sidestream.ops.lora.plan import lora_active, lora_plan_reference, lora_splits
from support.checks import Tolerance, assert_near, check_kernel, poison
from support.gluon_threads import kernels_in_threads
from support.linears import INT8_DEVIATION, NEAR
from support.sm90 import compile_launch

BF16, FP32 = torch.bfloat16, torch.float32
SHARED = 228 * 1024  # of an SM, with the 1 KB that the system has of it for a CTA
LLAMA_8B = [([4096, 1024, 1024], 4096), ([4096], 4096), ([14336, 14336], 4096), ([4096], 14336)]


def mixes(tokens: int, slots: int) -> dict[str, list[int]]:
    """Which token has which adapter."""
    return {
        "none": [-1] * tokens,
        "one": [slots - 1] * tokens,
        "in turn": [token % slots for token in range(tokens)],
        "some without": [(token * 5 + token // 7) % (slots + 1) - 1 if token % 3 else -1 for token in range(tokens)],
        "the last alone": [-1] * (tokens - 1) + [1],
        "one after another": [token * slots // tokens for token in range(tokens)],
    }


def inputs(
    tokens: int,
    k: int,
    slices: Sequence[int],
    rank: int = 32,
    slots: int = 5,
    splits: int = 2,
    index: list[int] | None = None,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Arguments of linear_8bit_lora but for the dtype; the product and the delta are both of order 1."""

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)

    def scales(size: float, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, device=device) + 0.5) * size

    n, meta = sum(slices), device == "meta"
    chosen = mixes(tokens, slots)["some without"] if index is None else index
    adapter_index = torch.tensor(chosen, dtype=torch.int32, device="cpu" if meta else device).to(device)
    active = (
        torch.empty(-(-tokens // 128), slots + 1, dtype=torch.int32, device=device)
        if meta
        else lora_active(adapter_index, slots)
    )
    planes = torch.randn(splits, tokens, len(slices) * rank, device=device) / splits**0.5
    return (
        whole(tokens, k),
        scales(1 / INT8_DEVIATION, tokens),
        whole(n, k),
        scales(1 / (INT8_DEVIATION * k**0.5), n),
        torch.where(adapter_index[None, :, None] >= 0, planes, 0.0),
        whole(slots, n, rank),
        scales(1 / (INT8_DEVIATION * rank**0.5), slots, n),
        adapter_index,
        active,
        list(slices),
    )


# The reference


@pytest.mark.parametrize("slices", [[96], [64, 32], [64, 48, 16]], ids=str)
@pytest.mark.parametrize("mix", mixes(9, 5))
def test_reference_is_the_linear_with_a_delta(slices: list[int], mix: str) -> None:
    args = inputs(140, 64, slices, rank=16, index=mixes(140, 5)[mix])
    q, scale, weight, weight_scale, planes, b, b_scale, index, *_ = args
    delta = lora_expand(planes, b, *lora_plan_reference(index, 5, 16), 16, slices, b_scale)
    got = linear_8bit_lora(*args, FP32)
    alone = linear_8bit(q, scale, weight, weight_scale, None, None, FP32)
    # the delta is rounded to bf16 there
    assert_near(got, linear_8bit(q, scale, weight, weight_scale, delta, None, FP32), Tolerance(2e-2, 2e-2))
    assert torch.equal(got[index < 0], alone[index < 0])
    assert mix == "none" or not torch.isclose(got[index >= 0], alone[index >= 0], rtol=0.1, atol=0.1).all()
    assert linear_8bit_lora(*args, BF16).equal(got.to(BF16)), "rounded once"


def test_delta_is_b_times_the_ranks_of_each_token() -> None:
    """Token by token in fp64, where no rounding changes anything."""
    slices = [32, 16]
    q, scale, weight, weight_scale, planes, b, b_scale, index, active, _ = inputs(7, 64, slices, rank=16, splits=3)
    planes = (planes * 8).round()
    b_scale = torch.full_like(b_scale, 0.25)
    got = linear_8bit_lora(
        q, scale, torch.zeros_like(weight), weight_scale, planes, b, b_scale, index, active, slices, FP32
    )
    for token, slot in enumerate(index.tolist()):
        ranks = planes[:, token].sum(0).double()
        rows = b[slot].double() / 4
        expected = torch.cat([rows[:32] @ ranks[:16], rows[32:] @ ranks[16:]]) if slot >= 0 else torch.zeros(48)
        assert_near(got[token], expected.float())


def test_misfits_are_named() -> None:
    args = inputs(9, 64, [64, 32], rank=16)
    assert fits(300, 4096, [4096, 1024, 1024], 32, 8, 4) is None and fits(65536, 144, [128], 16, 1, 1) is None
    for given, named in (
        ((0, 4096, [4096], 32, 8, 4), "0 tokens"),
        ((300, 4100, [4096], 32, 8, 4), "4100 input"),
        ((300, 4096, [4096] * 4, 32, 8, 4), "4 packed"),
        ((300, 4096, [4096, 64], 32, 8, 4), "4096, 64 rows; .* multiples of 128"),
        ((300, 4096, [128], 64, 8, 4), "multiples of 256"),
        ((300, 4096, [0], 32, 8, 4), "multiples"),
        ((300, 4096, [4096], 24, 8, 4), "rank 24"),
        ((300, 4096, [4096], 32, 0, 4), "no adapters"),
        ((300, 4096, [2**17], 64, 256, 4), "256 adapters.* 255"),
        ((300, 512, [4096], 32, 8, 2), "512 input features; with 2 planes of rank 32 .* 528"),
    ):
        assert re.search(named, str(fits(*given)))
    with pytest.raises(ValueError, match=r"planes is \(2, 9, 32\).*1 slices.*\(2, 9, 16\)"):
        linear_8bit_lora(*args[:9], [96], BF16)
    with pytest.raises(ValueError, match=r"slices \[64, 16\]"):
        linear_8bit_lora(*args[:9], [64, 16], BF16)
    with pytest.raises(ValueError, match=r"int8"):
        linear_8bit_lora(args[0].float(), *args[1:], BF16)
    with pytest.raises(ValueError, match=r"lora_active"):
        linear_8bit_lora(*args[:8], args[8][:, 1:], args[9], BF16)
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        linear_8bit_lora.launch(*args, FP32, out=(args[0],))
    with pytest.raises(ValueError, match=r"64 input|interpreter"):
        linear_8bit_lora.launch(*args, BF16, out=(args[0],))


@pytest.mark.parametrize(("slices", "k"), LLAMA_8B, ids=str)
@pytest.mark.parametrize("tokens", [257, 300, 512, 1000, 4096, 16384])
@pytest.mark.parametrize("rank", [16, 32, 64])
def test_configurations(tokens: int, slices: list[int], k: int, rank: int) -> None:
    assert fits(tokens, k, slices, rank, 8, lora_splits(k, tokens)) is None
    config = lora_config(tokens, k, slices, rank, 132)
    assert config in candidates(slices, rank) and config.warps == 8 and (rank < 64 or config.block_t == 128)
    tuned = tuned_table("linear_int8").get((sum(slices), k, 512))
    if tokens in (300, 512) and tuned in large_candidates() and rank < 64:
        assert config == tuned
    assert {each.block_n for each in candidates([4096, 384], 32)} == {128}


# The kernel in threads


@pytest.mark.parametrize("config", candidates([256], 32), ids=lambda config: f"{config.block_t} x {config.block_n}")
@pytest.mark.parametrize(
    ("tokens", "slices", "k", "rank", "splits", "programs", "mix"),
    [
        (300, [256], 640, 32, 2, 2, "some without"),
        (300, [256, 256], 256, 16, 1, 3, "one after another"),
        (130, [512, 256, 256], 384, 32, 1, 3, "in turn"),
        (257, [256, 512], 640, 64, 1, 9, "in turn"),
        (300, [256], 768, 32, 2, 1, "one"),
        (129, [256], 512, 16, 3, 2, "the last alone"),
        (200, [512], 384, 32, 1, 2, "none"),
        (20, [256], 1152, 64, 2, 1, "some without"),
        (520, [256], 384, 16, 2, 2, "one after another"),
    ],
)
def test_kernel_in_threads(
    config: LinearConfig, tokens: int, slices: list[int], k: int, rank: int, splits: int, programs: int, mix: str
) -> None:
    if config not in candidates(slices, rank):
        pytest.skip("not launched with such tiles")
    args = inputs(tokens, k, slices, rank, splits=splits, index=mixes(tokens, 5)[mix])
    out = poison(torch.empty(tokens, sum(slices), dtype=BF16))
    with kernels_in_threads(module, kernel_lora_large, kernel_large):
        launch(*args, BF16, out=(out,), sm_budget=programs, config=config)
    assert_near(out, linear_8bit_lora.reference(*args, BF16), NEAR)


# Machine code


@pytest.mark.machine_code
@pytest.mark.parametrize(
    ("rank", "slices", "k", "config"),
    [(rank, slices, k, config) for rank in (32, 64) for slices, k in LLAMA_8B for config in candidates(slices, rank)],
    ids=str,
)
def test_kernel_compiles_without_spills(rank: int, slices: list[int], k: int, config: LinearConfig) -> None:
    args = inputs(300, k, slices, rank, slots=8, device="meta")
    out = torch.empty(300, sum(slices), dtype=BF16, device="meta")
    (code,) = compile_launch(launch, *args, BF16, out=(out,), pdl=True, config=config)
    assert code.spills == 0 and code.shared_bytes <= SHARED
    assert code.sass["IGMMA"] > 0 and code.sass["HGMMA"] > 0 and code.sass["HMMA"] == 0 and code.sass["UTMASTG"] > 0


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("slices", "k"), LLAMA_8B, ids=str)
@pytest.mark.parametrize("tokens", [300, 1024, 4096])
def test_launch(tokens: int, slices: list[int], k: int) -> None:
    for rank, mix in ((32, "one after another"), (64, "in turn"), (16, "some without")):
        args = inputs(
            tokens, k, slices, rank, slots=8, splits=lora_splits(k, tokens), index=mixes(tokens, 8)[mix], device="cuda"
        )
        check_kernel(linear_8bit_lora, *args, BF16, tolerances={0: NEAR}, pdl=True)


@pytest.mark.gpu
@pytest.mark.parametrize("config", candidates([256], 32), ids=lambda config: f"{config.block_t} x {config.block_n}")
@pytest.mark.parametrize("mix", mixes(9, 5))
@pytest.mark.parametrize("rank", [16, 32, 64])
def test_every_mix(config: LinearConfig, mix: str, rank: int) -> None:
    for tokens, slices, k in ((777, [512, 256, 256], 1040), (130, [256], 2048), (3000, [1024, 1024], 4096)):
        if config not in candidates(slices, rank):
            continue
        for slots in (1, 5, 64):
            index = [min(slot, slots - 1) for slot in mixes(tokens, max(slots, 2))[mix]]
            args = inputs(tokens, k, slices, rank, slots, index=index, device="cuda")
            expected = linear_8bit_lora.reference(*args, BF16)
            results = []
            for options in ({"pdl": True}, {"sm_budget": 37}, {}):
                results.append(poison(torch.empty_like(expected)))
                launch(*args, BF16, out=(results[-1],), config=config, **options)
            assert_near(results[0], expected, NEAR)
            assert all(torch.equal(results[0], other) for other in results[1:]), "other bits at another launch"
            if mix == "none":
                plain = torch.empty_like(expected)
                linear_8bit.launch(*args[:4], None, None, BF16, out=(plain,))
                assert torch.equal(results[0], plain), "tiles without adapters are the linear's own"
