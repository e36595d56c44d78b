"""Sampling: the right distribution, the same token for the same seed, the kernel's tokens those of the reference."""

import math
from typing import Any

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.elementwise.sample import gumbel_noise, perturbed_scores, sample, top_logprobs
from support.checks import bits, poison
from support.sm90 import launched


def arguments(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[torch.Tensor]:
    """One request's parameters for every row; seeds and steps are drawn."""
    rows = logits.shape[0]

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype)

    keys = [torch.randint(-(2**62), 2**62, (rows,)), torch.randint(0, 10**6, (rows,))]
    return [logits, column(temperature), column(top_k, torch.int32), column(top_p), column(min_p), *keys]


def exact_distribution(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """What the request asked for, in plain Python: min_p, top_k, then top_p on what is left."""
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    order = [i for i in order if weights[i] >= min_p][: top_k or None]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass < top_p * total:
            kept.append(i)
        mass += weights[i]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def chi_square_excess(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of the chi-square statistic from its mean, in standard deviations."""
    possible = expected > 0
    assert (counts[~possible] == 0).all(), "a token was drawn that the filters exclude"
    freedom = int(possible.sum()) - 1
    statistic = float(((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


@pytest.mark.parametrize("keys", ["random", "seeds in a row", "steps in a row"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 4, 1.0, 0.0),
        (0.8, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.15),
        (0.9, 6, 0.7, 0.05),
        (1.0, 1, 1.0, 0.0),
    ],
)
def test_distribution(keys: str, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    draws = 20000
    logits = torch.randn(12) * 1.5
    args = arguments(logits.expand(draws, -1), temperature, top_k, top_p, min_p)
    if keys == "seeds in a row":
        args[5], args[6] = torch.arange(draws), torch.full((draws,), 3)
    elif keys == "steps in a row":
        args[5], args[6] = torch.full((draws,), 1234), torch.arange(draws)
    counts = torch.bincount(sample(*args), minlength=12).double()
    expected = (
        torch.tensor(exact_distribution(logits.tolist(), temperature, top_k, top_p, min_p), dtype=torch.float64) * draws
    )
    assert chi_square_excess(counts, expected) < 5


def test_a_large_vocabulary_is_drawn_evenly(pytestconfig: pytest.Config) -> None:
    each = 20 if pytestconfig.getoption("--exhaustive") else 5
    counts = torch.bincount(sample(*arguments(torch.zeros(1000 * each, 1000))), minlength=1000).double()
    assert chi_square_excess(counts, torch.full((1000,), float(each), dtype=torch.float64)) < 5


def test_noise_is_gumbel_and_independent_of_neighbours() -> None:
    seeds = torch.arange(64)
    noise = gumbel_noise(seeds, torch.zeros(64, dtype=torch.int64), 4096).double()
    assert abs(noise.mean() - 0.5772) < 0.02 and abs(noise.var() - math.pi**2 / 6) < 0.05
    assert noise.min() > -3 and noise.max() < 23
    for left, right in (
        (noise[:-1], noise[1:]),
        (noise[:, :-1], noise[:, 1:]),
        (noise, gumbel_noise(seeds, torch.ones(64, dtype=torch.int64), 4096).double()),
    ):
        assert abs(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]) < 0.01


def test_same_request_same_token_anywhere_in_any_batch() -> None:
    args = arguments(torch.randn(33, 500), 0.9, 50, 0.95)
    tokens = sample(*args)
    shuffled = torch.randperm(33)
    assert torch.equal(sample(*(arg[shuffled] for arg in args)), tokens[shuffled])
    assert torch.equal(sample(*(arg[7:8] for arg in args)), tokens[7:8])
    later = [*args[:6], args[6] + 1]
    assert (sample(*later) != tokens).float().mean() > 0.5


def test_greedy_takes_the_lowest_of_equal_best() -> None:
    logits = torch.tensor([[0.0, 3.0, -1.0, 3.0], [5.0, 1.0, 5.0, 5.0], [float("-inf"), -7.0, float("-inf"), -8.0]])
    assert sample(*arguments(logits, temperature=0.0)).tolist() == [1, 0, 1]


BROKEN = torch.tensor([[1.0, torch.nan, 2.0], [1.0, torch.inf, 2.0], [-torch.inf] * 3, [1.0, 5.0, 2.0]])


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_what_is_no_number_gives_no_token(temperature: float) -> None:
    assert sample(*arguments(BROKEN, temperature)).tolist() == [-1, -1, -1, 1]


def check_broken(device: str) -> None:
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (0.2, 0, 1.0), (0.2, 2, 0.9)):
        args = [arg.to(device) for arg in arguments(BROKEN.repeat(1, 100), temperature, top_k, top_p)]
        tokens = poison(OPS["sample"].fake(*args))
        OPS["sample"].launch(*args, out=(tokens,))
        assert tokens[:3].tolist() == [-1] * 3 and tokens[3] % 3 == 1


@pytest.mark.interpret
def test_kernel_with_what_is_no_number() -> None:
    check_broken("cpu")


@pytest.mark.gpu
def test_what_is_no_number_on_the_gpu() -> None:
    check_broken("cuda")


def test_ties_at_the_top_k_threshold_stay() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0]).expand(2000, -1)
    assert set(sample(*arguments(logits, top_k=2)).tolist()) == {0, 1, 2}


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.zeros(2000, 6)
    logits[:, [1, 4]] = float("-inf")
    assert set(sample(*arguments(logits)).tolist()) == {0, 2, 3, 5}


def test_top_logprobs() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, -1.0, 4.0, 1.0]])
    result = top_logprobs(logits.bfloat16(), torch.tensor([2, 2], dtype=torch.int32), 2)
    total = torch.log(torch.exp(logits).sum(1))
    torch.testing.assert_close(result.token_logprob, torch.stack([2 - total[0], 4 - total[1]]))
    assert result.token_rank.tolist() == [3, 1]
    assert set(result.ids[0].tolist()) == {1, 3} and result.ids[1].tolist() == [2, 3]
    torch.testing.assert_close(result.logprobs[1], torch.stack([4 - total[1], 1 - total[1]]))
    assert top_logprobs(logits, torch.tensor([0, 0]), 0).ids.shape == (2, 0)
    assert top_logprobs(logits, torch.tensor([0, 0]), 9).ids.shape == (2, 4)


def check_tokens(args: list[torch.Tensor], **options: Any) -> None:
    """The kernel's tokens are the reference's, but for near ties: two best scores within 1e-4, or a top_p that is
    within 1e-5 of a token's edge.
    """
    tokens, again = (poison(OPS["sample"].fake(*args)) for _ in range(2))
    OPS["sample"].launch(*args, out=(tokens,), **options)
    OPS["sample"].launch(*args, out=(again,), **options)
    assert torch.equal(bits(tokens), bits(again))
    assert ((tokens >= 0) & (tokens < args[0].shape[1])).all()
    close = torch.zeros_like(tokens, dtype=torch.bool)
    for shift in (1.0, 1 - 1e-5, 1 + 1e-5):
        scores = perturbed_scores(*args[:3], (args[3] * shift).where(args[3] < 1, args[3]), *args[4:])
        close |= scores.gather(1, tokens.long()[:, None])[:, 0] >= scores.amax(1) - torch.where(args[1] > 0, 1e-4, 0.0)
    assert close.all(), f"rows {(~close).nonzero().flatten().tolist()} differ"
    assert (tokens != OPS["sample"].reference(*args)).float().mean() <= 0.02


def mixed_requests(rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """Rows of different sharpness, and every combination of parameters."""

    def cycle(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).repeat(rows)[:rows]

    args = arguments((torch.randn(rows, vocabulary) * torch.linspace(0.5, 6, rows)[:, None]).to(dtype))
    args[1:3] = [cycle([0.0, 0.3, 0.7, 1.0, 1.5, 1e-3]), cycle([0, 5, 50, 1, 2000], torch.int32)]
    args[3:5] = [cycle([1.0, 0.9, 0.5, 0.99]), cycle([0, 0, 0.05, 0, 0, 0, 0.2])]
    return [arg.to(device) for arg in args]


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype"),
    [(13, 1000, torch.bfloat16), (11, 131, torch.float32), (5, 9001, torch.bfloat16), (3, 1, torch.float32)],
)
def test_kernel(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    args = mixed_requests(rows, vocabulary, dtype)
    check_tokens(args)
    check_tokens(args, sm_budget=2)


@pytest.mark.interpret
def test_kernel_with_ties_zeros_and_banned_tokens() -> None:
    logits = torch.randn(6, 300).bfloat16().clamp(-1, 1)  # many equal best ones
    logits[:, ::3] *= 0.0  # zeros of both signs
    logits[:, 5:40] = float("-inf")
    for top_k, top_p in ((0, 1.0), (100, 1.0), (3, 0.7), (0, 0.4)):
        check_tokens(arguments(logits, 0.7, top_k, top_p))
    check_tokens(arguments(logits, 0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [128256, 32003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_gpu(vocabulary: int, dtype: torch.dtype) -> None:
    for rows in (1, 256):
        args = mixed_requests(rows, vocabulary, dtype, "cuda")
        check_tokens(args, pdl=True)
    check_tokens(args, sm_budget=5)


@pytest.mark.gpu
def test_distribution_on_the_gpu() -> None:
    logits = torch.randn(40) * 1.5
    args = [arg.cuda() for arg in arguments(logits.expand(50000, -1).contiguous(), 0.8, 20, 0.9, 0.02)]
    counts = torch.bincount(torch.ops.sidestream.sample(*args), minlength=40).double().cpu()
    expected = torch.tensor(exact_distribution(logits.tolist(), 0.8, 20, 0.9, 0.02), dtype=torch.float64) * 50000
    assert chi_square_excess(counts, expected) < 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_machine_code(dtype: torch.dtype) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    args = (
        meta(64, 128256, dtype=dtype),
        meta(64),
        meta(64, dtype=torch.int32),
        meta(64),
        meta(64),
        meta(64, dtype=torch.int64),
        meta(64, dtype=torch.int64),
    )
    (code,) = launched(OPS["sample"], *args, pdl=True)
    assert (
        code.spills == 0
        and code.registers * 32 * code.num_warps <= 65536
        and code.sass["ATOMG"] + code.sass["RED"] == 0
    )
