"""Experts of tokens: torch.topk and the routers of transformers are the oracles, ties go to the lower expert."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.moe.route import MANY_TOKENS, moe_route
from support.checks import EXACT, Tolerance, check_kernel
from support.moe_samples import router_inputs
from support.sm90 import launched

BF16, FP32 = torch.bfloat16, torch.float32
WEIGHTS = {0: EXACT, 1: Tolerance(1e-5, 1e-6)}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(8, 2, 40000), (32, 1, 20000), (128, 8, 30000), (256, 8, 10000), (8, 8, 1000)]
)
def test_reference_is_topk_of_the_softmax(experts: int, top_k: int, tokens: int, normalize: bool) -> None:
    x, weight, _, slots, *_ = router_inputs(tokens, 16, experts, top_k, normalize, dtype=FP32)
    chosen, weights = moe_route(x, weight, None, slots, top_k, normalize)
    probabilities = (x.double() @ weight.double().T).softmax(1)
    values, order = probabilities.topk(top_k)
    if normalize:
        values /= values.sum(1, keepdim=True)
    torch.testing.assert_close(weights.double(), values, rtol=1e-5, atol=1e-7)
    # logits are rounded to fp32, so that two of them may be equal where the product in fp64 has an order
    other = chosen != order
    assert other.float().mean() < 1e-4
    torch.testing.assert_close(
        probabilities.gather(1, chosen.long())[other], probabilities.gather(1, order)[other], rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize(
    ("family", "name", "normalize"),
    [
        ("qwen3_moe", "Qwen3MoeTopKRouter", True),
        ("qwen3_moe", "Qwen3MoeTopKRouter", False),
        ("mixtral", "MixtralTopKRouter", True),
        ("granitemoe", "GraniteMoeTopKRouter", True),
    ],
)
def test_reference_is_the_router_of_transformers(family: str, name: str, normalize: bool) -> None:
    config = SimpleNamespace(
        num_experts=16, num_local_experts=16, num_experts_per_tok=4, hidden_size=32, norm_topk_prob=normalize
    )
    router = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(config)
    x, weight, _, slots, *_ = router_inputs(300, 32, 16, 4, normalize, dtype=FP32)
    router.weight.data.copy_(weight)
    with torch.no_grad():
        _, want, order = router(x)
    chosen, weights = moe_route(x, weight, None, slots, 4, normalize)
    assert torch.equal(chosen.long(), order)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)


def tied(experts: int, device: str = "cpu") -> torch.Tensor:
    """Inputs whose logits are small integers in any order of the sum: many of them are equal."""
    return torch.randint(-1, 2, (experts, 32), device=device).to(BF16)


def expected_with_ties(x: torch.Tensor, weight: torch.Tensor, top_k: int) -> list[list[int]]:
    logits = (x.float() @ weight.float().T).tolist()
    return [sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:top_k] for row in logits]


def test_of_equal_logits_the_lower_expert_is_first() -> None:
    x, weight = tied(50), tied(16)
    chosen, weights = moe_route(x, weight, None, torch.zeros(50, dtype=torch.int32), 6, True)
    assert chosen.tolist() == expected_with_ties(x, weight, 6)
    assert (weights.diff(dim=1) <= 0).all()


def test_padding_has_no_experts_and_adapters_move_the_others() -> None:
    x, weight, delta, slots, *rest = router_inputs(9, 32, 8, 2, True, delta=True, padding=3)
    chosen, weights = moe_route(x, weight, delta, slots, *rest)
    assert (chosen[6:] == -1).all() and (weights[6:] == 0).all() and (chosen[:6] >= 0).all()
    delta[:, 5] = 1000.0
    assert (moe_route(x, weight, delta, slots, *rest)[0][:6, 0] == 5).all()


# one token; several blocks of experts; experts and features that fill no block; fewer experts than a block
CASES = [(1, 512, 128, 8), (18, 96, 40, 3), (5, 300, 8, 1), (3, 64, 8, 8), (2, 32, 256, 4)]


@pytest.mark.interpret
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "experts", "top_k"), CASES)
def test_kernel(tokens: int, hidden: int, experts: int, top_k: int, normalize: bool) -> None:
    for dtype, delta in ((BF16, normalize), (FP32, not normalize)):
        args = router_inputs(tokens, hidden, experts, top_k, normalize, delta=delta, dtype=dtype, padding=tokens // 3)
        check_kernel(OPS["moe_route"], *args, tolerances=WEIGHTS)


@pytest.mark.interpret
@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(66, 640, 130), (70, 100, 8)])
def test_kernel_for_many_tokens(tokens: int, hidden: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream.ops.moe.route.MANY_TOKENS", 64)
    check_kernel(OPS["moe_route"], *router_inputs(tokens, hidden, experts, 2, True, padding=5), tolerances=WEIGHTS)


@pytest.mark.interpret
def test_kernel_prefers_the_lower_of_equal_experts() -> None:
    x, weight = tied(20), tied(16)
    out = moe_route.fake(x, weight, None, None, 6, False)
    moe_route.launch(x, weight, None, torch.zeros(20, dtype=torch.int32), 6, False, out=out)
    assert out[0].tolist() == expected_with_ties(x, weight, 6)


@pytest.mark.interpret
def test_kernel_gives_experts_and_no_weights_to_what_is_no_number() -> None:
    x, weight, _, slots, *rest = router_inputs(3, 64, 16, 4, True)
    x[1, 7] = float("nan")
    out = moe_route.fake(x, weight, None, slots, *rest)
    moe_route.launch(x, weight, None, slots, *rest, out=out)
    for chosen, weights in (out, moe_route.reference(x, weight, None, slots, *rest)):
        assert chosen[1].tolist() == [0, 1, 2, 3] and weights[1].isnan().all()
        assert weights[[0, 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 256, 257, 2048, 8192])
@pytest.mark.parametrize(
    ("hidden", "experts", "top_k", "normalize"), [(2048, 128, 8, True), (4096, 8, 2, True), (1536, 40, 8, False)]
)
def test_on_the_gpu(tokens: int, hidden: int, experts: int, top_k: int, normalize: bool) -> None:
    # sums of another order may choose another of two experts that are about as good
    args = router_inputs(tokens, hidden, experts, top_k, normalize, delta=normalize, padding=tokens // 4, device="cuda")
    few = {0: Tolerance(0.0, float(experts), differing=1e-3), 1: Tolerance(1e-3, 1e-4)}
    check_kernel(OPS["moe_route"], *args, tolerances=few, pdl=normalize)


@pytest.mark.machine_code(each="tokens")
@pytest.mark.parametrize(("hidden", "experts", "top_k"), [(2048, 128, 8), (4096, 8, 2)])
@pytest.mark.parametrize("tokens", [1, 32 * MANY_TOKENS])
def test_machine_code(tokens: int, hidden: int, experts: int, top_k: int) -> None:
    x = torch.empty(tokens, hidden, device="meta", dtype=BF16)
    slots = torch.empty(tokens, device="meta", dtype=torch.int32)
    for normalize in (True, False):
        codes = launched(moe_route, x, x.new_empty(experts, hidden), None, slots, top_k, normalize, pdl=True)
        assert len(codes) == 2
        assert all(code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1 for code in codes)
        assert "ld.global.b16" not in codes[0].ptx_text
